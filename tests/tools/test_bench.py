"""The benchmark's honesty: no ratio without equal bits, a harness that catches wrong results, no numbers without a GPU."""

from __future__ import annotations

import datetime
import io
import json
from types import SimpleNamespace

import pytest
import torch
from oracle import layout_of, quantized
from rich.console import Console
from verbs import output_of

from benchmarks.baselines import UNSLOTH_TRITON
from nf4_patch.tools import llama, report
from nf4_patch.tools.bench import matmul, timing
from nf4_patch.tools.bench.record import BITSANDBYTES, CEILING, OURS, Bench, Row, accuracy, bits, table
from nf4_patch.tools.bench.timing import Machine, Times

MACHINE = Machine("a GPU", "90", "580.1", "SM clock 1 MHz", {"torch": "2.11.0", "triton": "3.6.0"})


def comparison(same: dict[str, bool]) -> Row:
    us = {OURS: 10.0, BITSANDBYTES: 25.0, UNSLOTH_TRITON: 11.0, CEILING: 9.5}
    times = {name: Times((value, value)) for name, value in us.items()}
    return Row("4096x4096 bf16", "us", times, bits(same), 42_000_000, {"n": 4096, "k": 4096})


def report_of(*rows: Row) -> Bench:
    return Bench(MACHINE, {"dequantize": list(rows)}, {"dequantize": "how"})


def text_of(*renderables) -> str:
    console = Console(width=240, record=True, markup=False, file=io.StringIO())
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize(
    ("same", "ratios"),
    [
        ({BITSANDBYTES: True, UNSLOTH_TRITON: True}, {BITSANDBYTES: 2.5, UNSLOTH_TRITON: 1.1, CEILING: 0.95}),
        ({BITSANDBYTES: False, UNSLOTH_TRITON: True}, {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}),
        ({BITSANDBYTES: True, UNSLOTH_TRITON: False}, {BITSANDBYTES: 2.5, UNSLOTH_TRITON: None, CEILING: 0.95}),
        ({UNSLOTH_TRITON: False}, {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}),
        ({}, {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}),  # nothing was compared
    ],
)
def test_a_ratio_needs_the_bits_of_its_baseline_and_of_bitsandbytes(same, ratios):
    report = report_of(comparison(same))
    assert report.as_dict()["sections"]["dequantize"][0]["ratio"] == pytest.approx(ratios)
    assert report.exit_code == (not all(same.values()))
    text = text_of(*report.render())
    shown = {BITSANDBYTES: "2.50x", UNSLOTH_TRITON: "1.10x", CEILING: "95.0%"}
    assert {name: words in text for name, words in shown.items()} == {n: bool(r) for n, r in ratios.items()}
    assert text.count("check failed") == list(ratios.values()).count(None)
    for name in (name for name, equal in same.items() if not equal):
        assert f"4096x4096 bf16: the bits differ from {name}" in text
    assert all(word in text for word in ("how", "a GPU", "580.1", "SM clock", "triton 3.6.0"))


def test_what_is_not_timed_is_an_empty_cell():
    """A row without ours, as calibrate has it where no config is right: times and no word about a check."""
    only = Row("a", "us", {BITSANDBYTES: Times((25.0,))}, {})
    text = text_of(table("title", [only, comparison({BITSANDBYTES: True})]))
    assert "25.00 \n" in text.replace("25.00  ", "25.00 \n") and "check failed" not in text


def test_noise_is_a_variant_against_itself():
    assert Times((10.0, 11.0, 10.0, 11.0)).noise == pytest.approx(0.1)
    assert Times((10.0,)).noise == 0.0


def test_the_order_turns_every_round_and_a_warm_up_is_not_counted():
    said = []
    times = timing.alternating({"a": "a", "b": "b"}, lambda side: said.append(side) or len(said), rounds=2)
    assert "".join(said) == "baabba" and times["a"].values == (3, 6)


def test_json_holds_every_time():
    data = json.loads(json.dumps(report_of(comparison({BITSANDBYTES: True})).as_dict()))
    (shown,) = data["sections"]["dequantize"]
    assert shown["times"][OURS] == [10.0, 10.0] and shown["median"][OURS] == 10.0
    assert shown["ratio"][BITSANDBYTES] == 2.5 and shown["sizes"] == {"n": 4096, "k": 4096}
    assert shown["checks"][BITSANDBYTES]["passed"] is True
    assert data["machine"]["releases"]["torch"] == "2.11.0" and {"date", "commit"} <= data["machine"].keys()
    assert data["method"] == {"dequantize": "how"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--step", "peft"]])
def test_no_gpu_no_numbers(arguments):
    said = output_of("bench", *arguments, exit_code=1)
    assert "no NVIDIA GPU: nothing can be measured here" in said and "us" not in said.split()


def test_the_machine_names_releases_date_and_commit(monkeypatch):
    properties = SimpleNamespace(uuid="0")
    for name, value in {"current_device": 0, "get_device_properties": properties, "get_device_capability": (9, 0),
                        "get_device_name": "a GPU"}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(timing, "answer", lambda *command: "")  # nvidia-smi's
    monkeypatch.setattr(report, "answer", lambda *command: "0123abcd\n")  # git's
    machine = timing.machine()
    assert machine.driver == "unknown" and machine.commit == "0123abcd"
    assert machine.date == datetime.date.today().isoformat()
    assert machine.releases["torch"] == torch.__version__
    assert {"bitsandbytes", "triton", "nf4-patch", "python"} <= machine.releases.keys()


def test_no_commit_where_git_does_not_know_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(report.nf4_patch, "__file__", str(tmp_path / "__init__.py"))
    assert report.commit() is None


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_step_is_in_the_dtype_that_the_gpu_computes_in(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = llama.config_of(llama.Shape(128, 256, 1, 2, 2), llama.training_dtype())
    model = llama.build_4bit(config, device="cpu")
    projection = model.model.layers[0].self_attn.q_proj
    assert (projection.compute_dtype, projection.weight.quant_state.dtype, model.lm_head.weight.dtype) == (dtype,) * 3


# a fused matmul


def product(ours: float, theirs: float) -> Row:
    times = {OURS: Times((10.0, 10.0)), BITSANDBYTES: Times((30.0, 30.0)), matmul.DEQUANTIZE: Times((20.0, 20.0))}
    return Row("M=8", "us", times, {"fp64": accuracy(ours, theirs)}, sizes={"m": 8}, notes={"fused": "yes"})


def test_a_ratio_needs_the_accuracy_of_the_same_run():
    good, bad = product(1e-3, 1e-3), product(1.02e-3, 1e-3)
    assert good.ratio(BITSANDBYTES) == 3.0
    assert good.ratio(matmul.UNSLOTH) is None
    assert bad.ratio(BITSANDBYTES) is None
    report = Bench(MACHINE, {"64x128 bf16": [good, bad]}, {"64x128 bf16": "how"})
    assert report.exit_code == 1
    assert report.problems() == ["64x128 bf16, M=8: error 1.020e-03 against fp64, dequantize + matmul 1.000e-03"]
    text = text_of(*report.render())
    assert text.count("3.00x") == 1 and text.count("2.00x") == 1
    assert text.count("check failed") == 2
    shown = report.as_dict()["sections"]["64x128 bf16"][1]
    assert shown["ratio"][BITSANDBYTES] is None
    assert shown["checks"]["fp64"]["error"] == 1.02e-3 > shown["checks"]["fp64"]["limit"]


@pytest.mark.parametrize("nested", [True, False])
def test_exact_is_the_weight_before_rounding(nested):
    packed, state = quantized((96, 256), torch.float32, "cpu", nested=nested)
    weight = matmul.exact(layout_of(packed, state))
    assert weight.dtype is torch.float64
    assert torch.equal(weight.float(), matmul.reference.dequantize(layout_of(packed, state)))
    assert matmul.error(weight.float(), weight) < 1e-7
