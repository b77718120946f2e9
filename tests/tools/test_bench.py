"""The benchmark's honesty: no ratio without equal bits, a harness that catches wrong results, no numbers without a GPU."""

from __future__ import annotations

import datetime
import io
import json
import os
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from nf4_patch.tools import report
from nf4_patch.tools.bench import challenge, plots, shapes, timing
from nf4_patch.tools.bench import command as bench
from nf4_patch.tools.bench import training as steps
from nf4_patch.tools.bench.peers import BITSANDBYTES, OURS, UNSLOTH_TRITON
from nf4_patch.tools.bench.record import CEILING, Bench, Row, bits, table
from nf4_patch.tools.bench.timing import Machine, Times

MACHINE = Machine("a GPU", "90", "580.1", "SM clock 1 MHz", {"torch": "2.11.0", "triton": "3.6.0"})


def comparison(**same: bool) -> Row:
    times = {
        OURS: Times((10.0, 10.0)), BITSANDBYTES: Times((25.0, 25.0)), UNSLOTH_TRITON: Times((11.0, 11.0)),
        CEILING: Times((9.5, 9.5)),
    }  # fmt: skip
    checks = bits({name.replace("_", " "): equal for name, equal in same.items()})
    return Row("4096x4096 bf16", "us", times, checks, 42_000_000, {"n": 4096, "k": 4096})


def report_of(*rows: Row) -> Bench:
    return Bench(MACHINE, {"dequantize": list(rows)}, {"dequantize": "how"})


def text_of(*renderables) -> str:
    console = Console(width=240, record=True, markup=False, file=io.StringIO())
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


def test_ratio_and_percent_where_the_bits_agree():
    row = comparison(bitsandbytes=True, Unsloth_Triton=True)
    assert row.ratio(BITSANDBYTES) == 2.5
    assert row.ratio(UNSLOTH_TRITON) == pytest.approx(1.1)
    assert row.ratio(CEILING) == 0.95
    assert row.gigabytes_per_second == 4200.0
    report = report_of(row)
    text = text_of(*report.render())
    assert "2.50x" in text and "1.10x" in text and "95.0%" in text and "how" in text
    assert "a GPU" in text and "580.1" in text and "SM clock" in text and "triton 3.6.0" in text
    assert report.exit_code == 0


def test_no_speedup_where_our_bits_differ_from_bitsandbytes():
    row = comparison(bitsandbytes=False, Unsloth_Triton=True)
    assert row.ratio(BITSANDBYTES) is row.ratio(UNSLOTH_TRITON) is row.ratio(CEILING) is None
    assert row.gigabytes_per_second is None
    report = report_of(row)
    text = text_of(*report.render())
    assert "2.50x" not in text and "1.10x" not in text and "95.0" not in text
    assert text.count("check failed") == 3 and "4096x4096 bf16: the bits differ from bitsandbytes" in text
    assert report.exit_code == 1
    ratios = report.as_dict()["sections"]["dequantize"][0]["ratio"]
    assert ratios == {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}
    with pytest.raises(RuntimeError, match="nothing to draw"):
        plots.draw(report, "unused.png")


def test_a_peer_with_other_bits_loses_only_its_own_ratio():
    row = comparison(bitsandbytes=True, Unsloth_Triton=False)
    assert row.ratio(BITSANDBYTES) == 2.5 and row.ratio(UNSLOTH_TRITON) is None


def test_no_speedup_where_nothing_was_compared():
    assert comparison().ratio(BITSANDBYTES) is None and comparison().ratio(CEILING) is None


def test_no_ratio_where_the_only_peer_has_other_bits():
    row = comparison(Unsloth_Triton=False)
    assert row.ratio(UNSLOTH_TRITON) is row.ratio(CEILING) is None


def test_what_is_not_timed_is_an_empty_cell():
    """A row without ours, as calibrate has it where no config is right: times and no word about a check."""
    only = Row("a", "us", {BITSANDBYTES: Times((25.0,))}, {})
    text = text_of(table("title", [only, comparison(bitsandbytes=True)]))
    assert "25.00 \n" in text.replace("25.00  ", "25.00 \n") and "check failed" not in text


def test_noise_is_a_variant_against_itself():
    assert Times((10.0, 11.0, 10.0, 11.0)).noise == pytest.approx(0.1)
    assert Times((10.0,)).noise == 0.0


def test_json_holds_every_time():
    row = comparison(bitsandbytes=True)
    data = json.loads(json.dumps(report_of(row).as_dict()))
    (shown,) = data["sections"]["dequantize"]
    assert shown["times"][OURS] == [10.0, 10.0] and shown["median"][OURS] == 10.0
    assert shown["ratio"][BITSANDBYTES] == 2.5 and shown["sizes"] == {"n": 4096, "k": 4096}
    assert shown["checks"][BITSANDBYTES]["passed"] is True
    assert data["machine"]["releases"]["torch"] == "2.11.0" and {"date", "commit"} <= data["machine"].keys()
    assert data["method"] == {"dequantize": "how"}


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    plots.draw(report_of(comparison(bitsandbytes=True)), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_shapes_are_listed_once_and_start_with_the_challenge():
    listed = shapes.shapes()
    assert list(listed)[:3] == [(8192, 2048), (4096, 1024), (14336, 4096)]
    assert listed[14336, 4096] == "challenge, Llama 3.1 8B gate, up"
    assert (1024, 4096) in listed and (28672, 8192) in listed and (18944, 3584) in listed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--challenge"], ["--step", "peft"]])
def test_no_gpu_no_numbers(arguments):
    result = CliRunner().invoke(bench.command, arguments, obj=lambda *_: None)
    assert result.exit_code == 1
    assert "no NVIDIA GPU" in result.output and "us" not in result.stdout.split()


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return challenge.MLP(128, 256, torch.bfloat16, "cpu")


def right(layer):
    from nf4_patch import triton_dequantize_nf4

    return triton_dequantize_nf4(layer)


def test_challenge_passes_a_right_dequantization(mlp):
    challenge.check(mlp, torch.randn(2, 3, 128, dtype=torch.bfloat16), right, right)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda layer: right(layer) * 1.02, id="scale"),
        pytest.param(lambda layer: right(layer).float(), id="dtype"),
        pytest.param(lambda layer: right(layer).t(), id="transposed"),
        pytest.param(lambda layer: torch.zeros_like(right(layer)), id="unwritten"),
        pytest.param(lambda layer: right(layer).roll(1), id="shifted"),
    ],
)
def test_challenge_catches_a_wrong_dequantization(mlp, wrong):
    with pytest.raises(challenge.WrongResult):
        challenge.check(mlp, torch.randn(2, 3, 128, dtype=torch.bfloat16), wrong, right)


def test_challenge_catches_a_wrong_reference_by_the_forward(mlp):
    """A dequantization that equals a wrong reference still fails: bitsandbytes' own forward is the second check."""
    wrong = lambda layer: right(layer) * 1.1  # noqa: E731
    with pytest.raises(challenge.WrongResult):
        challenge.check(mlp, torch.randn(2, 3, 128, dtype=torch.bfloat16), wrong, wrong)


def test_challenge_total_is_the_sum_and_needs_every_part_equal():
    rows = [comparison(bitsandbytes=True), comparison(bitsandbytes=False)]
    total = challenge.total(rows)
    assert total.times[OURS].values == (20.0, 20.0)
    assert not total.checks[BITSANDBYTES].passed and total.ratio(BITSANDBYTES) is None


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


def test_a_first_step_is_compiled_anew(monkeypatch):
    model, folders = torch.nn.Linear(4, 1), []
    monkeypatch.setattr(torch, "compile", lambda m: folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]) or m)
    monkeypatch.setattr(steps.Step, "__call__", lambda self: self.model(torch.ones(4)).sum().detach())
    step = object.__new__(steps.FirstStep)
    step.model, step.losses = model, []
    step(), step()
    assert folders[0] != folders[1] and step.model is model
    assert step.losses == [model(torch.ones(4)).item()] * 2


@pytest.mark.parametrize(
    ("losses", "agree"), [((12.53, 12.531), True), ((12.53, 12.59), False), ((12.59, 12.53), False)]
)
def test_losses_of_two_compilations_need_agree_to_rounding_only(monkeypatch, losses, agree):
    monkeypatch.setattr(steps, "peft_model", lambda config: None)
    monkeypatch.setattr(steps, "optimizer_of", lambda model: None)
    monkeypatch.setattr(steps, "FirstStep", lambda *a: SimpleNamespace(losses=[losses[not a[-1]]] * 2, switch=None))
    monkeypatch.setattr(steps, "wall_times", lambda named, *a, **k: {name: Times((1.0, 1.0)) for name in named})
    (comparison,) = steps.compiling(lambda *a: None)
    assert (comparison.ratio(steps.UNPATCHED) == 1.0) is agree and bool(comparison.failures) is not agree
