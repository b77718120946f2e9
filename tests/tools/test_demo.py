"""``nf4-patch demo`` at its smallest: the main job, in the interpreter and as it runs where there is no GPU."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from subprocess_python import command
from verbs import output_of, report_of

from nf4_patch.patching.reasons import Reason
from nf4_patch.tools import demo
from nf4_patch.tools.bench import calibrate
from nf4_patch.tools.cli import main

STEPS, LINEARS = 2, 14


def check(report, png, linears=LINEARS):
    assert report["exit_code"] == 0 and report["problems"] == []
    without, patched = report["without"], report["patched"]
    assert len(without["losses"]) == STEPS
    assert without["losses"] == patched["losses"] and without["losses"][0] > without["losses"][1] > 0
    assert without["adapter"] == patched["adapter"]
    assert without["hits"] == 0 and without["fallbacks"] == {}
    rows = report["verification"]["rows"]
    assert [(row["cases"], row["differing"]) for row in rows] == [(linears, 0)]
    assert png.read_bytes().startswith(b"\x89PNG")


def run(tmp_path, size):
    """The report of the verb."""
    png = tmp_path / "demo.png"
    report = report_of(tmp_path, "demo", "--size", size, "--steps", STEPS, "--png", png)
    check(report, png, report["linears"])
    assert report["patched"]["fallbacks"] == {}
    return report


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU takes the place of the interpreter")
def test_with_the_kernel_under_the_interpreter(tmp_path):
    """Here the kernels were imported under the interpreter: the patched training runs in them."""
    report = run(tmp_path, "tiny")
    assert report["kernel_runs"]
    assert report["patched"]["hits"] == STEPS * LINEARS  # on the CPU bitsandbytes dequantizes in the backward only


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    report = run(tmp_path, "large")
    assert report["patched"]["hits"] == STEPS * report["linears"] * 3
    assert report["patched"]["peak_bytes"] > 0


@pytest.mark.full
def test_as_on_a_machine_without_a_gpu(tmp_path):
    """With the patch switched on in the environment too, and with the fused matmul, whose bits are others."""
    words = ["demo", "--size", "tiny", "--steps", STEPS, "--png", "demo.png", "--json", "report.json"]
    done = command(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="", NF4_PATCH="1", NF4_PATCH_MATMUL="auto")
    report = json.loads((tmp_path / "report.json").read_text())
    check(report, tmp_path / "demo.png")
    assert not report["kernel_runs"]
    assert report["patched"]["hits"] == 0
    assert report["patched"]["fallbacks"] == {"NOT_CUDA": STEPS * LINEARS}
    assert f"{STEPS * LINEARS} x NOT_CUDA" in done.stdout
    assert "training with the patch" in done.stderr
    assert " ms" not in done.stdout and " MiB" not in done.stdout  # nothing was replaced: no time is compared


@pytest.mark.parametrize("variable", ["NF4_PATCH", "NF4_USE_TRITON"])
def test_a_switched_off_patch_is_named_before_the_training(variable):
    said = output_of("demo", "--size", "tiny", exit_code=1, **{variable: "0"})
    assert "making the model" not in said
    assert "NF4_PATCH=0 or NF4_USE_TRITON=0 keeps the patch off" in " ".join(said.split())


@pytest.mark.parametrize("name", ["triton", "bitsandbytes", "peft", "accelerate"])
def test_a_missing_package_is_named_before_the_training(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *rest: None if wanted == name else find(wanted))
    said = output_of("demo", "--size", "tiny", exit_code=1)
    assert "making the model" not in said
    assert f"{name} is not installed: pip install '.[demo]'" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU falls back nowhere")
def test_strict_where_the_kernel_cannot_run_is_a_sentence(tmp_path):
    words = ["demo", "--size", "tiny", "--steps", 1, "--png", "demo.png"]
    done = command(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="", NF4_PATCH_STRICT="1")
    assert done.returncode == 1
    assert Reason.NOT_CUDA.sentence in done.stderr and "(NF4_PATCH_STRICT=1)" in done.stderr
    assert "Traceback" not in done.stderr


def trained(patched, **changes):
    return demo.Training(patched, **{"losses": [2.0, 1.0], "seconds": [0.1, 0.1], "adapter": "a", **changes})


def made(**changes):
    """A report of a demo where all is well, but for the changes."""
    verification = {"exit_code": 0, "failures": [], "rows": [{"cases": 1, "elements": 64, "differing": 0}]}
    fields = {
        "place": "a GPU", "kernel_runs": True, "size": "tiny", "parameters": 1, "linears": 1, "dtype": "float16", "tokens": 1,
        "without": trained(False), "patched": trained(True, hits=6),
        "verification": verification, "png": "demo.png",
    }  # fmt: skip
    return demo.DemoReport(**{**fields, **changes})


@pytest.mark.parametrize("peak_bytes", [None, 2**30], ids=["CPU", "GPU"])
def test_the_picture_has_times_only_where_they_compare_something(peak_bytes, tmp_path):
    report = made(without=trained(False, peak_bytes=peak_bytes), patched=trained(True, hits=6, peak_bytes=peak_bytes))
    demo.draw(report, tmp_path / "demo.picture")
    width = int.from_bytes((tmp_path / "demo.picture").read_bytes()[16:20], "big")
    assert width == (1200 if peak_bytes else 840)


def test_what_the_demo_calls_a_failure():
    assert made().exit_code == 0
    for failed in (
        trained(True, losses=[2.0, 1.0000000000000002], hits=6),
        trained(True, adapter="b", hits=6),
        trained(True),
        trained(True, hits=3, fallbacks={"KERNEL_FAILED": 3}),
    ):
        assert made(patched=failed).exit_code == 1, failed
    assert made(patched=trained(True, hits=3, fallbacks={"NOT_4BIT": 3})).exit_code == 0
    assert made(kernel_runs=False, patched=trained(True, fallbacks={"NOT_CUDA": 6})).exit_code == 0
    wrong = {"exit_code": 1, "failures": ["q_proj: 1 of 64 elements differ"], "rows": []}
    assert made(verification=wrong).exit_code == 1


@pytest.mark.parametrize(
    ("verb", "option", "known"), [("demo", "size", demo.SIZES), ("calibrate", "models", calibrate.NAMES)]
)
def test_what_can_be_chosen_is_what_there_is(verb, option, known):
    """The command line names it without importing the module."""
    found = next(parameter for parameter in main.commands[verb].params if parameter.name == option)
    assert list(found.type.choices) == list(known)
