"""What the compiler makes of every variant, for every GPU, on every Triton that matters. No GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import machine_code
import pytest
import torch
import triton
from subprocess_python import script, support

from nf4_patch.nf4.dequantize.compilation import warps_for

# The lowest release that is supported, Colab's, and the newest.
RELEASES = ("3.2.0", "3.6.0", "3.9.0")
FULL = ("installed, every variant", *RELEASES)
CACHE = Path(os.environ.get("NF4_TEST_TRITONS", Path.home() / ".cache" / "nf4_patch" / "triton"))

# SASS instructions an element on sm_75, blocksize 64, nested: what held on all of 3.2 to 3.9 (11/2026).
BUDGET = {"float16": 7.0, "bfloat16": 8.0, "float32": 10.0}
# Elsewhere the uniform datapath takes the address arithmetic; highest seen: 7.9 and 12.1 on sm_120.
BUDGET_ELSEWHERE = {"float16": 8.5, "bfloat16": 8.5, "float32": 13.0}
LOCAL_MEMORY = {"LDL", "STL"}
SHARED_MEMORY = {"LDS", "STS", "LDSM", "BAR"}


def release_of(name: str) -> Path | None:
    """The folder of a Triton release, from PyPI the first time; None is the installed one."""
    if name in ("installed", triton.__version__):
        return None
    folder = CACHE / name
    if not (folder / "triton" / "__init__.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        done = subprocess.run([*pip, "--target", str(folder), f"triton=={name}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot fetch triton {name} here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module", params=["installed", *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def compiled(request):
    release, _, every = request.param.partition(", ")
    folder = release_of(release)
    other = {} if folder is None else {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    result = json.loads(support("compile_matrix", "full" if every else "main", **other)[-1])
    assert result["triton"] == (triton.__version__ if release == "installed" else release)
    return result


def test_every_gpu_is_compiled_for(compiled):
    release = tuple(map(int, compiled["triton"].split(".")[:2]))
    too_new = {machine_code.sm(c) for c, first in machine_code.FIRST_TRITON.items() if release < first}
    assert {arch for arch, _ in compiled["unsupported"]} == too_new
    assert {row["arch"] for row in compiled["rows"]} == {*map(machine_code.sm, machine_code.CAPABILITIES)} - too_new
    assert all(row["target"].startswith(f"sm_{row['arch']}") for row in compiled["rows"])


def test_registers_only(compiled):
    """Nothing spills; no shared memory, no barrier: every tensor keeps its layout, a conversion would go through there."""
    for row in compiled["rows"]:
        assert row["stack"] == row["shared"] == 0, row
        assert not (LOCAL_MEMORY | SHARED_MEMORY).intersection(row["names"]), row
        assert row["registers"] <= 64, row  # 64: 1024 lanes still fit on a T4's SM


def test_widths_and_eviction(compiled):
    """A 32-bit load of packed words a step and one store of 16 bytes (8 at blocksize 32), both evict-first."""
    for row in compiled["rows"]:
        packed = [load.split(".") for load in row["loads"] if ".EF" in load]
        assert len(packed) == row["steps"], row
        assert not {"U8", "S8", "U16", "S16", "64", "128"}.intersection(*map(set, packed)), row
        width = "64" if row["blocksize"] == 32 else "128"
        main, tail = row["stores"][: row["steps"]], row["stores"][row["steps"] :]
        assert len(main) == row["steps"] and len(tail) == row["tail"], row
        assert all(".EF" in store and width in store.split(".") for store in main), row
        bytes_ = sum("U8" in load.split(".") for load in row["loads"])
        # Bytes are read one by one only from absmax (one load, if all of the CTA is in one block) and in the tail.
        assert bytes_ <= row["steps"] * row["nested"] + row["tail"] * (1 + row["nested"]), row
        assert row["ptx_evict_first"] > 0, row


def test_no_fused_multiply_add(compiled):
    """The scale has two roundings, code2[absmax] * absmax2 and + offset: a contraction would change bits."""
    for row in compiled["rows"]:
        assert "FFMA" not in row["names"] and row["ptx_fma"] == 0, row
        scales = row["steps"] + row["tail"] if row["nested"] else 0
        assert row["fadd"] == scales, row


def test_packed_loads_are_issued_before_code2_is(compiled):
    """code2[absmax] waits for absmax: what comes behind it waits two trips to memory."""
    for row in compiled["rows"]:
        assert row["packed_after_code2"] == [], row
        if row["nested"]:
            assert row["code2_loads"] >= row["steps"], row


def test_converts_are_those_of_the_gpu(compiled):
    for row in compiled["rows"]:
        if row["arch"] < 80:  # no packed convert, no bf16 convert: integer rounding
            assert row["packed_converts"] == 0, row
            assert "F2FP" not in row["names"], row
            assert ("F2F" in row["names"]) == (row["dtype"] == "float16"), row
        elif row["dtype"] != "float32":
            assert row["packed_converts"] > 0, row


def usual(compiled):
    return [row for row in compiled["rows"] if row["blocksize"] == 64 and row["nested"] and row["even"]]


def test_instruction_budget(compiled):
    assert {row["dtype"] for row in usual(compiled) if row["arch"] == 75} == set(BUDGET)
    for row in usual(compiled):
        budget = BUDGET if row["arch"] == 75 else BUDGET_ELSEWHERE
        assert row["per_element"] <= budget[row["dtype"]], row


def test_data_of_the_docs(compiled):
    """docs/data/instructions.json holds what this test counts, on the release that it names."""
    data = json.loads((Path(__file__).parents[2] / "docs" / "data" / "instructions.json").read_text())
    if data["triton"] != compiled["triton"]:
        pytest.skip(f"recorded with Triton {data['triton']}")
    warps = {machine_code.sm(c): warps_for(c, 2**26) for c in machine_code.CAPABILITIES}  # as instructions.py counts
    rows = [row for row in usual(compiled) if row["aligned"] and row["warps"] == warps[row["arch"]]]
    counted = {(f"sm_{row['arch']}", row["dtype"]): row["per_element"] for row in rows}
    ours = [row for row in data["kernels"] if row["kernel"] == "nf4_patch"]
    assert {(row["arch"], row["dtype"]): row["instructions"] for row in ours} == pytest.approx(counted, abs=0.006)


# scripts/check_kernel.py: one command each for random states, an older GPU's code, and counts from machine code

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernel.py"


@pytest.mark.gpu
def test_random_states_are_repeated_by_their_seed(tmp_path):
    file = tmp_path / "report.json"
    done = script(SCRIPT, "fuzz", 3, "--seed", 1, "--json", file, check=False)
    assert done.returncode == 0, done.stderr
    assert "mismatches: 0, out of bounds: 0" in done.stdout and "3 cases of seed 1" in done.stdout
    report = json.loads(file.read_text())
    assert (report["cases"], report["hits"]) == (3, 3)


def test_counts_next_to_bitsandbytes(tmp_path):
    file = tmp_path / "report.json"
    done = script(SCRIPT, "instructions", "--json", file)
    assert done.stdout.count("sm_75") == 6
    rows = {(row["dtype"], row["kernel"]): row for row in json.loads(file.read_text())["kernels"]}
    assert len(rows) == 6
    for dtype, budget in BUDGET.items():
        ours, theirs = rows[dtype, "nf4_patch"], rows[dtype, "bitsandbytes"]
        assert 5 < ours["instructions"] <= budget
        assert theirs["instructions"] > 2 * ours["instructions"]
        assert ours["registers"] <= 64 and ours["spills"] == 0


REFUSED = [  # the words, the exit code, what stderr says
    (("fuzz", 1, "--seed", "9" * 20), 2, ("'--seed': 99999999999999999999 is not in the range",)),
    (("instructions", "--arch", "volta"), 1, ("'volta' is not an architecture", "sm_75, 75 or 7.5")),
    (("instructions", "--arch", "sm_70"), 1, ("sm_70 is not supported", "sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120")),
    *[
        (("older-gpu", "sm_75"), 1, ("PTX needs an NVIDIA GPU to run on",)),
        (("fuzz", 1), 1, ("no NVIDIA GPU",)),
    ] * (not torch.cuda.is_available()),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_what_cannot_be_done_is_said(words, code, said):
    done = script(SCRIPT, *words, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in said), done.stderr
