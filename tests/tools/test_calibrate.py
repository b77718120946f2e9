"""`nf4-patch calibrate` without a GPU: the rule by which a config wins, and the command."""

from __future__ import annotations

import functools
import json

import matmul_reference
import pytest
import torch
from calibration import CONFIG, GPU, entry_of, row
from oracle import layout_of, quantized
from verbs import output_of

from nf4_patch.nf4.matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS
from nf4_patch.patching import calibrated
from nf4_patch.tools.bench import calibrate
from nf4_patch.tools.bench import matmul as bench_matmul
from nf4_patch.tools.bench.record import BITSANDBYTES, OURS, Check, Row
from nf4_patch.tools.bench.timing import Times


def point(m, ours, theirs, noise=0.0, config=CONFIG):
    def times(value):
        return Times((value, value * (1 + noise)) * 2)

    taken = {BITSANDBYTES: times(theirs), bench_matmul.DEQUANTIZE: times(100.0)}
    taken |= {} if ours is None else {OURS: times(ours)}
    return Row(f"M={m}", "us", taken, {"fp64": Check(True, "")}, sizes={"m": m}), config


def taken(*points):
    return [(row["m"], row["config"] is not None) for row in calibrate.decided(points)]


def test_what_wins_is_faster_beyond_the_margin():
    assert taken(point(1, 10, 10.31)) == [(1, True)]
    assert taken(point(1, 10, 10.29)) == [(1, False)]
    assert taken(point(1, 10, 10.31, noise=0.05)) == [(1, False)]  # a thing against itself differs by more
    assert taken(point(1, 101, 200)) == [(1, False)]  # dequantize + matmul takes 100
    assert taken(point(1, None, 200, config=None)) == [(1, False)]  # nothing compiled


def test_a_range_is_won_at_both_ends():
    assert taken(point(1, 10, 10), point(2, 10, 15), point(8, 11, 30)) == [(1, False), (2, True), (8, True)]
    # at 8 rows it wins, and at 3 the others may be as fast as at 2, where they take less than ours at 8
    assert taken(point(1, 10, 12), point(2, 10, 12), point(8, 13, 30)) == [(1, True), (2, True), (8, False)]
    assert taken(point(1, 10, 12), point(2, 13, 30)) == [(1, True), (2, True)]  # nothing lies between


def test_candidates_are_what_is_shipped_for_as_many_rows():
    for m in calibrate.ROWS:
        shipped = [row.config for row in SMALL_M_ROWS + SMALL_M_CANDIDATES if row.max_m >= m]
        assert sorted(calibrate.candidates(m)) == sorted(set(shipped)) != []
    assert calibrate.candidates(65) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are checked so")
def test_a_config_that_is_wrong_is_not_timed(monkeypatch):
    """The reference passes for a config; one weight that is off, or the sums, and it is named by what is wrong."""
    packed, state = quantized((256, 512), torch.bfloat16, "cpu")
    layout, weights = layout_of(packed, state), bench_matmul.Weights([(packed, state)])
    x = weights.rows_of_x(8)

    def check(change):
        def multiply(config, x, packed, state, out=None):
            result = change(matmul_reference.matmul(x, layout), int(x.count_nonzero()) == len(x))
            return result if out is None else out.copy_(result)

        monkeypatch.setattr(calibrate, "multiply", multiply)
        return calibrate.check(CONFIG, x, weights)

    def one_bit(result, one_hot):
        result.view(torch.int16)[3, 5] ^= one_hot
        return result

    assert check(lambda result, one_hot: result).passed
    other = check(one_bit)
    assert not other.passed and other.found == "one-hot rows do not give the bits of dequantize"
    off = check(lambda result, one_hot: result if one_hot else result * 1.01)
    assert not off.passed and off.error == pytest.approx(0.01, rel=0.1)  # and the rounding to bf16


def call(*arguments, file="off", exit_code=0):
    return output_of("calibrate", *arguments, exit_code=exit_code, NF4_PATCH_CALIBRATION=str(file))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine with no GPU")
def test_without_a_gpu(tmp_path):
    file = tmp_path / "none.json"
    assert "no NVIDIA GPU: nothing can be measured here" in call(file=file, exit_code=1)
    assert not file.exists()


@pytest.fixture
def with_a_gpu(machine, monkeypatch):
    """``measure`` is replaced by what a GPU would give; ``machine`` and the shapes that it was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked = []

    def measure(shapes, tell, failures=()):
        asked.append(shapes)
        rows = [point(8, 10.0, 28.0)[0]]
        entry = entry_of(matmul={f"{n}x{k}": [row(8, CONFIG)] for n, k in shapes})
        return calibrate.Calibration(entry, rows, list(failures))

    monkeypatch.setattr(calibrate, "measure", measure)
    return machine, asked


def test_the_command_adds_to_what_the_same_releases_measured(with_a_gpu, tmp_path):
    machine, asked = with_a_gpu
    other = entry_of(releases={**entry_of()["releases"], "triton": "2.0"})
    file = machine({"another GPU, sm_80": other})
    call("--shape", "128x256", file=file)
    said = call("--shape", "64x64", file=file)
    assert asked == [[(128, 256)], [(64, 64)]]
    written = json.loads(file.read_text())
    assert list(written) == ["another GPU, sm_80", GPU] and written["another GPU, sm_80"] == other
    assert list(written[GPU]["matmul"]) == ["128x256", "64x64"]
    assert f"{GPU} is remembered in {file}" in said and "2.80x" in said
    assert calibrated.in_force(0).status == "calibrated on 2026-11-21, 2 shapes"
    # of other releases nothing is kept
    written[GPU]["releases"]["triton"] = "2.0"
    machine(written)
    call("--model", "llama-1b", file=file)
    assert list(json.loads(file.read_text())[GPU]["matmul"]) == ["512x2048", "2048x2048", "8192x2048", "2048x8192"]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ((), (1024, 4096)),
        (("--shape", "64x64"), (64, 64)),
        (("--shape", "64x64", "--model", "llama-1b"), (512, 2048)),
    ],
)
def test_llama_8b_is_measured_unless_something_else_is_named(words, first, with_a_gpu, tmp_path):
    _, asked = with_a_gpu
    call(*words, file=tmp_path / "calibration.json")
    assert asked[0][0] == first and len(asked[0]) == {0: 4, 2: 1, 4: 5}[len(words)]


def test_a_damaged_file_is_replaced(with_a_gpu):
    machine, _ = with_a_gpu
    file = machine(b"{")
    call("--shape", "64x64", file=file)
    assert calibrated.in_force(0).status == "calibrated on 2026-11-21, 1 shape"


def test_where_it_cannot_be_remembered_nothing_is_measured(with_a_gpu, tmp_path):
    _, asked = with_a_gpu
    (tmp_path / "file").write_text("")
    call("--shape", "64x64", file=tmp_path / "file" / "calibration.json", exit_code=1)
    assert not asked


def test_what_cannot_be_remembered_is_still_shown(with_a_gpu, monkeypatch, tmp_path):
    def full(path, entries):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibrated, "write", full)
    said = call("--shape", "64x64", file=tmp_path / "calibration.json")
    assert "was not written: No space left on device" in said and "2.80x" in said


def test_a_wrong_config_fails_the_command(with_a_gpu, monkeypatch, tmp_path):
    wrong = "64x64, 8 rows, Config(): one-hot rows do not give the bits of dequantize"
    monkeypatch.setattr(calibrate, "measure", functools.partial(calibrate.measure, failures=[wrong]))
    assert wrong in call(file=tmp_path / "calibration.json", exit_code=1)


@pytest.mark.parametrize(
    ("arguments", "file", "message"),
    [
        ((), "off", "NF4_PATCH_CALIBRATION=off"),
        (("--shape", "4096"), "x.json", "--shape 4096: give it as NxK"),
        (("--shape", "64x65"), "x.json", "K a multiple of 64"),
    ],
)
def test_wrong_uses(arguments, file, message, with_a_gpu, tmp_path):
    assert message in call(*arguments, file="off" if file == "off" else tmp_path / file, exit_code=2)
