"""The pages agree with the code and the data: generated parts, figures, Reasons, names of files, links."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from run_example import completed

import nf4_patch
from benchmarks import Bench, bits, offload
from benchmarks.record import Check, Row
from benchmarks.timing import Machine, Times
from examples import offline
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools import advice
from nf4_patch.tools.cli import main
from scripts import render_docs

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*render_docs.PAGES, ROOT / "CONTRIBUTING.md"]
FILES = [
    file.as_posix()
    for folder in ("benchmarks", "examples", "nf4_patch", "scripts", "tests")
    for file in (ROOT / folder).rglob("*.py")
]


def test_generated_parts_are_current(capsys):
    assert render_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_generated_part_and_figure_is_somewhere():
    found = {match[1] for page in render_docs.PAGES for match in render_docs.PART.finditer(page.read_text())}
    assert found == render_docs.BLOCKS.keys()


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_no_measured_figure_is_typed_by_hand(page):
    """Each measured figure belongs in docs/data and in a generated part."""
    text = render_docs.PART.sub("", page.read_text())
    assert not re.findall(r"\d\.\d+ ?[\u00d7x]\B|\d\.\d+ ?(?:ms|\u00b5s|GiB|GB|%)", text)
    # a comment that begins a line would end the paragraph
    assert not re.findall(r"^\s*<!-- [\w-]+ -->", page.read_text(), flags=re.MULTILINE)


def test_one_sentence_says_what_the_project_is():
    described = re.search(r'^description = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    sentence = f"{described[1]}."
    assert sentence in README.read_text() and nf4_patch.__doc__.startswith(sentence) and main.help == sentence


def test_pages_are_short():
    """Tables count too. Figures that few readers need are in docs/data."""
    assert len(README.read_text().split()) <= 600
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= 24_000


def test_a_mixture_that_doctor_recommends_was_measured_on_such_a_gpu():
    ours = dict.fromkeys(("mixture-24", "mixture-16", "mixture-12"), 16) | {"mixture-8": 8}
    found = {row.key: row for row in advice.MIXTURES}
    for key, rank in ours.items():
        (share,) = re.findall(r'offload="(.*?)"', found[key].line) or ["off"]
        where = {"model": "Qwen3-30B-A3B", "offload": share, "rank": rank, "optimizer": "adamw8bit"}
        peaks = [run["training_gb"] for run in render_docs.offload(**render_docs.ALL | where)]
        assert peaks and max(peaks) + 0.5 <= found[key].gigabytes <= float(found[key].gpu.split()[0])


def test_status_in_the_readme_is_what_it_prints(monkeypatch):
    from nf4_patch.patching.state import State
    from nf4_patch.patching.targets import TARGETS
    from nf4_patch.snapshot import Status, TargetStatus, WeightStatus

    for library in ("unsloth", "liger_kernel"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    (shown,) = re.findall(r"^```text\n(nf4_patch is on.*?)\n```$", README.read_text(), re.MULTILINE | re.DOTALL)
    hits = {name: int(count) for name, count in re.findall(r"^  (\S+): patched, (\d+) hits$", shown, re.MULTILINE)}

    def state_of(target):
        is_imported = target.library in ("bitsandbytes", "transformers", "peft", "torch")
        return (State.INACTIVE if target.option else State.PATCHED) if is_imported else State.WAITING

    targets = tuple(TargetStatus(target.name, state_of(target), hits.pop(target.name, 0)) for target in TARGETS)
    shapes = (WeightStatus((4096, 4096), "bfloat16", "", sum(target.hits for target in targets), 28),)
    assert str(Status(True, targets, shapes)) == shown and not hits


def test_a_healthy_training_in_troubleshooting_is_what_status_prints():
    from nf4_patch.patching.effects import Effect, line

    (shown,) = re.findall(
        r'  ```text\n(  graphs="auto".*?)\n  ```', (ROOT / "docs" / "troubleshooting.md").read_text(), re.DOTALL
    )
    for row in shown.splitlines():
        name, value, used, others = re.findall(r'(\w+)="(\w+)": ([\d,]+) of .*? calls(.*)', row)[0]
        refused = {reason: int(count) for count, reason in re.findall(r"(\d+) x (\w+)", others)}
        assert line(name, Effect(value, used=int(used.replace(",", "")), refused=refused)) == row.strip()


@pytest.mark.parametrize("file", sorted(render_docs.DATA.glob("*.json")), ids=lambda file: file.name)
def test_data_file_is_whole_and_named_by_its_command(file):
    patterns = {re.escape(name).replace("GPU", "(h200|h100)") for name in render_docs.sources()}
    assert any(re.fullmatch(pattern, file.name) for pattern in patterns), "add its command to docs/data/README.md"
    data = json.loads(file.read_text())
    if isinstance(data, dict):
        assert not data.get("failures") and not data.get("exit_code")
        assert not any(row.get("differing") for row in data.get("rows", ()))
        assert not data.get("mismatches") and not data.get("out_of_bounds")
        if "machine" in data:
            assert {"gpu", "capability", "releases", "date", "commit"} <= data["machine"].keys()


def recorded(name, folder, monkeypatch, **sections):
    """Write a benchmark with these sections on an H100 as the data file NAME-h100.json."""
    machine = Machine("NVIDIA H100", "90", "1", "", {"torch": "2.11.0"}, date="2026-11-22", commit="1")
    bench = Bench(machine, sections, dict.fromkeys(sections, ""))
    (folder / f"{name}-h100.json").write_text(json.dumps(bench.as_dict()))
    monkeypatch.setattr(render_docs, "DATA", folder)


def write_rows(name, folder, monkeypatch, *rows):
    recorded(name, folder, monkeypatch)
    file = folder / f"{name}-h100.json"
    file.write_text(json.dumps({"machine": json.loads(file.read_text())["machine"], "rows": rows}))


def test_what_the_bench_writes_is_what_is_rendered(tmp_path, monkeypatch):
    sides = {"nf4_patch": Times((2.0,)), "bitsandbytes": Times((5.0,)), "ceiling": Times((1.0,))}
    rows = [
        Row(f"64x{64 * factor} bf16", "us", sides, bits({"bitsandbytes": factor == 1}), nbytes=1) for factor in (1, 2)
    ]
    recorded("bench", tmp_path, monkeypatch, dequantize=rows)
    shown = render_docs.BLOCKS["dequantize"]().splitlines()[-2:]
    assert shown[0] == "| 64\u00d764 bf16 | 2.00 | 5.00 (2.50\u00d7) | 1.00 (0.50\u00d7) |"
    assert shown[1].count("check failed") == 2 and "\u00d7)" not in shown[1]


def test_a_table_names_releases_only_if_they_are_not_those_of_the_page(tmp_path, monkeypatch):
    sides = {"nf4_patch": Times((2.0,)), "bitsandbytes": Times((5.0,))}
    row = Row("64x64 bf16", "us", sides, bits({"bitsandbytes": True}), nbytes=1)
    for name in ("bench", "generate", "other"):
        recorded(name, tmp_path, monkeypatch, dequantize=[row])
    assert render_docs.measured() == "from 2026-11-22 to 2026-11-22 with torch 2.11.0"
    assert render_docs.BLOCKS["dequantize"]().startswith("H100, [bench-h100.json](data/bench-h100.json):\n\n| ")
    file = tmp_path / "bench-h100.json"
    file.write_text(file.read_text().replace("2.11.0", "2.14.1"))
    assert render_docs.BLOCKS["dequantize"]().startswith("H100 with torch 2.14.1, [bench-h100.json]")


FIGURES = {"tokens": 512, "gpu_ms": 15.8, "gpu_spread": 0.1, "wall_ms": 40.04, "wall_spread": 0.3,
           "peak_gib": 5.125, "reserved_gib": 6.25}  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "gpu", "wall"),
    [
        (0.5, "2.00\u00d7", "2.00\u00d7"),
        (0.87, "1.15\u00d7", "\u22481"),
        (0.95, "\u22481", "\u22481"),
        (1.25, "0.80\u00d7", "\u22481"),
        (2, "0.50\u00d7", "0.50\u00d7"),
    ],
)
def test_a_gain_is_more_than_the_noise(factor, gpu, wall, tmp_path, monkeypatch):
    """The run spreads by 10 % in GPU time, and by 30 % in wall-clock time. A loss is treated like a gain."""
    ours = FIGURES | {"gpu_ms": 15.8 * factor, "wall_ms": 40.04 * factor}
    write_rows("recipe", tmp_path, monkeypatch, {"side": "peft", **FIGURES}, {"side": "patch", **ours})
    assert [row["speedup"] for row in render_docs.speedups("recipe", "patch", "peft")] == [wall, gpu]


def test_what_was_trained_with_offload_has_the_bits_of_the_resident_model():
    """This holds for every value of offload= and every cap on the memory."""
    compared = [row for row in render_docs.records("offload") if row["bits"]]
    resident = {offload.key(row, "cap", "budget"): row for row in compared if row["side"] == "resident"}
    assert len(compared) > len(resident) > 1
    for row in compared:
        other = resident[offload.key(row, "cap", "budget")]
        assert all(row[field] == other[field] for field in ("bits", "losses", "gradients", "adapters"))


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"), [(0.2, 0, "\u22481"), (0, 0.2, "\u22481"), (0.05, 0.05, "1.10\u00d7")]
)
def test_a_ratio_is_more_than_the_noise_of_either_side(ours, theirs, shown):
    sides = {"nf4_patch": Times((10.0,)), "stock": Times((11.0,))}
    row = Row("batch 1", "ms", sides, {"stock": Check(True, "")}).as_dict()
    row["noise"] = {"nf4_patch": ours, "stock": theirs}
    assert render_docs.side_of(row, "stock")["compared"] == f"11.00 ({shown})"


def test_one_line_has_the_address_of_the_repository(tmp_path, monkeypatch):
    """Without the address, README does not change.

    With it, the install line and the links for a package index contain the address.
    """
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    absolute = runpy.run_path(str(ROOT / "hatch_build.py"))["absolute"]
    address, text = "https://github.com/someone/nf4_patch", README.read_text()
    assert absolute(text, "") == text
    links = re.findall(r"\]\(([^)]*)\)", absolute(text, address))
    assert len(links) > 15 and all(link.startswith("https://") for link in links)
    assert absolute("![bars](docs/bars.svg)", address) == f"![bars]({address}/raw/main/docs/bars.svg)"
    assert f"[recipes]({address}/blob/main/docs/recipes.md#x), [a](#b)" in absolute(
        "[recipes](docs/recipes.md#x), [a](#b)", address
    )
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(
        re.sub(r'^repository = ""', f'repository = "{address}"', project, flags=re.MULTILINE)
    )
    monkeypatch.setattr(render_docs, "ROOT", tmp_path)
    shown = render_docs.BLOCKS["install"]()
    assert f"pip install git+{address} bitsandbytes peft transformers trl liger-kernel " in shown
    assert "colab.research.google.com/github/someone/nf4_patch/blob/main/examples/t4_colab.ipynb" in shown


def test_every_data_file_is_written_by_a_command_that_exists():
    assert len(render_docs.sources()) > 10
    for command in render_docs.sources().values():
        program, *words = command.split()
        if program == "nf4-patch":
            assert words[0] in main.commands, command
        else:
            assert importlib.util.find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).exists(), command


def test_reasons_that_troubleshooting_explains_exist():
    more = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Reasons")[1].split("<!-- /reasons -->")[1]
    named = {
        name
        for names in re.findall(r"^\* \*\*([A-Z_, ]+)\*\*:", more, flags=re.MULTILINE)
        for name in names.split(", ")
    }
    assert named and named <= Reason.__members__.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_commands_that_a_page_names_exist(page):
    """Links are not checked here, because sphinx checks them."""
    text = page.read_text()
    for name in re.findall(r"`([\w/]+/\w+\.py)`", text):
        assert "toy" in name or any(f"/{file}".endswith(f"/{name}") for file in FILES), name
    for script in re.findall(r"\bscripts/[\w.]+\w", text):
        assert (ROOT / script).exists(), script
    for verb in re.findall(r"nf4-patch ([a-z]+)\b(?! is)", text):
        assert verb in main.commands, verb
    for table, file in re.findall(r"`([A-Z_]+)` (?:in|of) `([\w/]+\.py)`", text):
        assert re.search(rf"^{table}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {table}"


def test_every_example_is_in_the_gallery():
    scripts = {p.name for p in (ROOT / "examples").glob("*.*") if p.suffix in (".py", ".ipynb", ".yaml", ".json")}
    for name in scripts - {"layer_by_layer.py", "offline.py", "record.py"}:  # what the examples share
        assert f"(../examples/{name})" in (ROOT / "docs" / "examples.md").read_text(), name


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="Liger's kernels run on this GPU")
def test_an_example_with_liger_says_what_it_needs_without_a_gpu(tmp_path):
    """Without the message, Triton's error "0 active drivers" would end the script after the model was loaded."""
    command = [sys.executable, ROOT / "examples" / "qlora_moe.py", "--liger-loss"]
    done = completed(command, tmp_path, TRITON_INTERPRET="0")
    assert done.returncode == 2 and "need an NVIDIA GPU or TRITON_INTERPRET=1" in done.stderr, done.stderr


@pytest.mark.parametrize("model", ["random", "random-qwen-moe"])
def test_an_example_refuses_a_checkpoint_without_a_tokenizer(model, tmp_path):
    """For Qwen, transformers returns an empty tokenizer instead of an error, and merge_adapter.py would save this
    tokenizer with the merged weights.
    """
    offline.checkpoint(model, folder=str(tmp_path))
    assert offline.tokenizer_of(str(tmp_path))("text").input_ids
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        offline.tokenizer_of(str(tmp_path))


@pytest.mark.full
def test_site_builds_without_warnings():
    """The build checks every link and every linked heading, each page's place in the menu, and the docstrings of the API."""
    subprocess.run([ROOT / "scripts" / "docs"], check=True, env={**os.environ, "PYTHON": sys.executable})


def test_the_site_is_never_installed_into_a_python_outside_a_virtual_environment(tmp_path):
    """Use a Python without the site's packages and without pip, so that nothing would be installed if this test failed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {Path(sys.base_prefix, "bin", "python3")} -I -S "$@"\n')
    python.chmod(0o755)
    for name in (python, tmp_path / "missing"):
        environment = {**os.environ, "PYTHON": str(name)}
        done = subprocess.run([ROOT / "scripts" / "docs"], env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and "virtual environment" in done.stderr and "pip" not in done.stderr, done


def test_every_figure_of_a_gpu_says_what_it_measures():
    release = runpy.run_path(str(ROOT / "scripts" / "release"))
    files = [file.name for file in (ROOT / "docs" / "data").glob("*-h?00.json")]
    assert files and not [name for name in files if not any(map(name.startswith, release["MEASURES"]))]
    for path in {path for paths in release["MEASURES"].values() for path in paths}:
        assert (ROOT / "nf4_patch" / path).exists(), path


def test_figures_are_measured_on_every_gpu(tmp_path, monkeypatch):
    """The GPUs measure at the same time.

    The files move to docs/data only at the end, because other files would record a changed checkout.
    """
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "DATA", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    together, ran = threading.Barrier(2), {}

    def run(command, cwd, env):
        together.wait(60)
        assert not list(tmp_path.iterdir())
        ran[command[2]] = env["CUDA_VISIBLE_DEVICES"], command[3:5]
        Path(command[-1]).write_text("{}")
        return types.SimpleNamespace(returncode=int(command[2] == "benchmarks.recipe"))

    monkeypatch.setattr(measure.subprocess, "run", run)
    assert measure.main(["recipe", "bench", "--", "--seconds", "400"]) == 1
    assert sorted(device for device, _ in ran.values()) == ["0", "1"]
    assert {*ran} == {"benchmarks.recipe", "benchmarks.dequantize"}
    assert all(words == ["--seconds", "400"] for _, words in ran.values())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bench-h200.json", "recipe-h200.json"]
