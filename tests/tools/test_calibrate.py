"""`nf4-patch calibrate` without a GPU: the rule by which a config wins, the command, and who reads its file."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import matmul_reference
import pytest
import torch
from oracle import layout_of, quantized
from verbs import output_of

import nf4_patch
from nf4_patch.matmul import calibrated, launch
from nf4_patch.matmul import product as fused_matmul
from nf4_patch.matmul.tuning import ANY, SMALL_M_CANDIDATES, SMALL_M_ROWS, SmallMConfig, SmallMRow
from nf4_patch.nf4 import runtime
from nf4_patch.patching.config import Config, ConfigError
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools import calibrate, doctor
from nf4_patch.tools import matmul as bench_matmul
from nf4_patch.tools.matmul import BITSANDBYTES, OURS
from nf4_patch.tools.timing import Times

ADA = (8, 9)  # which no shipped table knows
NAMES = {0: "NVIDIA GeForce RTX 4090", 1: "NVIDIA L40S"}
GPU = "NVIDIA GeForce RTX 4090, sm_89"
RELEASES = {"nf4_patch": "0.1.0", "triton": "3.6.0", "bitsandbytes": "0.50.2", "unsloth": None}
CONFIG, SHIPPED = SmallMConfig(1, 1, 8, True, 2), SmallMConfig(1, 1, 4, True, 2)
TWO_SHAPES = "calibrated on 2026-11-21, 2 shapes"


def ranges(*points):
    us = {OURS: 10.0, BITSANDBYTES: 28.0}
    return [{"m": m, "config": config and config._asdict(), "us": us, "noise": 0.004} for m, config in points]


def entry_of(**changes):
    """What a file holds for a GPU."""
    shapes = {"4096x4096": ranges((1, None), (8, CONFIG), (64, None)), "1024x4096": ranges((8, CONFIG))}
    releases = {"torch": "2.11.0", **RELEASES}
    return {"date": "2026-11-21", "releases": releases, "dtype": "bfloat16", "matmul": shapes, **changes}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs that no table knows; ``machine(entries)`` makes the file, which is then the one in use."""
    monkeypatch.setattr(runtime, "name_of", lambda device: NAMES[device])
    monkeypatch.setattr(runtime, "capability_of", lambda device: ADA)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 128)
    monkeypatch.setattr(calibrated, "releases", lambda: RELEASES)
    file = tmp_path / "cache" / "calibration.json"

    def use(entries):
        if isinstance(entries, dict):
            calibrated.write(file, entries)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(entries)
        calibrated.use(SimpleNamespace(calibration=file))
        calibrated.forget()
        return file

    yield use
    calibrated.use(SimpleNamespace(calibration=None))
    calibrated.forget()


# the rule


def point(m, ours, theirs, noise=0.0, config=CONFIG):
    values = {OURS: ours, BITSANDBYTES: theirs, bench_matmul.DEQUANTIZE: 100.0}
    times = {name: Times((value, value * (1 + noise)) * 2) for name, value in values.items() if value is not None}
    return calibrate.Point(m, times, config)


@pytest.mark.parametrize(
    ("points", "wins"),
    [
        ([point(1, 10, 10.31)], [True]),
        ([point(1, 10, 10.29)], [False]),  # within the margin
        ([point(1, 10, 10.31, noise=0.05)], [False]),  # a thing against itself differs by more
        ([point(1, 101, 200)], [False]),  # dequantize + matmul takes 100
        ([point(1, None, 200, config=None)], [False]),  # nothing compiled
        ([point(1, 10, 10), point(2, 10, 15), point(8, 11, 30)], [False, True, True]),
        # at 8 rows it wins, and at 3 the others may be as fast as at 2, where they take less than ours at 8
        ([point(1, 10, 12), point(2, 10, 12), point(8, 13, 30)], [True, True, False]),
        ([point(1, 10, 12), point(2, 13, 30)], [True, True]),  # nothing lies between
    ],
)
def test_what_wins_is_faster_beyond_the_margin_and_at_both_ends_of_its_range(points, wins):
    assert [row["config"] is not None for row in calibrate.decided(points)] == wins


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

    def wrong(change):
        def multiply(config, x, packed, state, out=None):
            result = change(matmul_reference.matmul(x, layout), int(x.count_nonzero()) == len(x))
            return result if out is None else out.copy_(result)

        monkeypatch.setattr(calibrate, "multiply", multiply)
        return calibrate.wrong(CONFIG, x, weights)

    def one_bit(result, one_hot):
        result.view(torch.int16)[3, 5] ^= one_hot
        return result

    assert wrong(lambda result, one_hot: result) == ""
    assert wrong(one_bit) == "one-hot rows do not return the bits of dequantize"
    off = re.match(r"error (.*) against fp64", wrong(lambda result, one_hot: result if one_hot else result * 1.01))
    assert float(off[1]) == pytest.approx(0.01, rel=0.1)  # and the rounding to bf16


# the command


def call(*arguments, file="off", exit_code=0):
    return output_of("calibrate", *arguments, exit_code=exit_code, NF4_PATCH_CALIBRATION=str(file))


@pytest.fixture
def measured(machine, monkeypatch):
    """The shapes that ``measure`` was asked for, which is replaced by what a GPU would give."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    shapes_asked = []

    def measure(shapes, tell, failures=()):
        shapes_asked.append(shapes)
        entry = entry_of(matmul={f"{n}x{k}": ranges((8, CONFIG)) for n, k in shapes})
        return calibrate.Calibration(entry, list(failures))

    monkeypatch.setattr(calibrate, "measure", measure)
    return shapes_asked


def test_the_command_adds_to_what_the_same_releases_measured(machine, measured):
    other = entry_of(releases={**entry_of()["releases"], "triton": "2.0"})
    file = machine({"another GPU, sm_80": other})
    call("--shape", "128x256", file=file)
    said = call("--shape", "64x64", file=file)
    assert measured == [[(128, 256)], [(64, 64)]]
    written = json.loads(file.read_text())
    assert list(written) == ["another GPU, sm_80", GPU] and written["another GPU, sm_80"] == other
    assert list(written[GPU]["matmul"]) == ["128x256", "64x64"]
    assert f"The calibration of {GPU} is saved in {file}" in said and "2.80x" in said
    assert calibrated.in_force(0).status == TWO_SHAPES
    # of other releases nothing is kept, nor of an entry without a dtype or a damaged file
    entry = written[GPU]
    lacking = {name: value for name, value in entry.items() if name != "dtype"}
    for content in ({GPU: entry | {"releases": other["releases"]}}, {GPU: lacking}, b"{"):
        machine(content)
        call("--model", "llama-1b", file=file)
        assert list(json.loads(file.read_text())[GPU]["matmul"]) == ["512x2048", "2048x2048", "8192x2048", "2048x8192"]


@pytest.mark.parametrize(
    ("words", "first", "count"),
    [
        ((), (1024, 4096), 4),
        (("--shape", "64x64"), (64, 64), 1),
        (("--shape", "64x64", "--model", "llama-1b"), (512, 2048), 5),
    ],
)
def test_llama_8b_is_measured_unless_something_else_is_named(words, first, count, measured, tmp_path):
    call(*words, file=tmp_path / "calibration.json")
    assert measured[0][0] == first and len(measured[0]) == count


def test_what_cannot_be_remembered_is_still_shown(measured, monkeypatch, tmp_path):
    def full(path, entries):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibrated, "write", full)
    said = call("--shape", "64x64", file=tmp_path / "calibration.json")
    assert "calibration.json: No space left on device" in said and "2.80x" in said


def test_a_wrong_config_fails_the_command(measured, monkeypatch, tmp_path):
    wrong = "64x64, 8 rows, Config(): one-hot rows do not return the bits of dequantize"
    monkeypatch.setattr(calibrate, "measure", functools.partial(calibrate.measure, failures=[wrong]))
    assert wrong in call(file=tmp_path / "calibration.json", exit_code=1)


@pytest.mark.parametrize(
    ("words", "file", "exit_code", "message"),
    [
        ((), "off", 2, "NF4_PATCH_CALIBRATION is off"),
        (("--shape", "4096"), "x.json", 2, "--shape 4096 is not valid. Give NxK"),
        (("--shape", "64x65"), "x.json", 2, "K a multiple of 64"),
        (("--shape", "64x64"), "file/x.json", 2, "is a file"),
    ],
)
def test_wrong_uses_measure_nothing(words, file, exit_code, message, measured, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert message in call(*words, file=file, exit_code=exit_code) and not measured


# the file, the GPU and the releases that it holds for, and who reads it


def configs(device, rows, n=4096, k=4096):
    return [fused_matmul.config_for(device, m, n, k) for m in rows]


def test_it_decides_for_this_gpu_and_the_sizes_it_measured_before_the_shipped_table(machine, monkeypatch):
    file = machine({GPU: entry_of()})
    assert [path.name for path in file.parent.iterdir()] == ["calibration.json"]  # no temporary file is left
    assert (calibrated.in_force(0).status, calibrated.in_force(1).status) == (TWO_SHAPES, "")
    assert calibrated.in_force(0).rows[4096, 4096] == ((1, None), (8, CONFIG), (64, None))
    assert calibrated.in_force(1).rows == {}
    assert configs(0, (1, 2, 8, 9, 64, 65)) == [None, CONFIG, CONFIG, None, None, None]
    others = ((0, 4096, 4097), (0, 4095, 4096), (0, 8192, 4096), (1, 4096, 4096))
    assert [configs(device, [8], n, k) for device, n, k in others] == [[None]] * 4
    assert launch.config_for(ADA, 8, 4096, 4096) is None
    monkeypatch.setattr(launch, "SMALL_M_ROWS", (SmallMRow(ADA, 64, ANY, 1, SHIPPED),))
    calibrated.forget()
    assert configs(0, (1, 8, 64)) == [None, CONFIG, None]
    assert configs(1, [8]) == configs(0, [8], 4096, 14336) == [SHIPPED]


def test_the_answers_that_were_remembered_follow_the_file(machine):
    """config_for and remembered products are resolved again when another file is used."""
    machine({GPU: entry_of()})
    assert configs(0, [8]) == [CONFIG]
    multiplier = fused_matmul.FusedMatmul("test")
    multiplier.launches["a weight"] = None
    calibrated.use(SimpleNamespace(calibration=None))
    assert configs(0, [8]) == [None] and not multiplier.launches


@pytest.mark.parametrize(
    ("name", "release", "here"),
    [
        ("nf4_patch", "0.0.9", "0.1.0"),
        ("triton", "3.7.1", "3.6.0"),
        ("bitsandbytes", None, "0.50.2"),
        ("unsloth", "2026.10.9", "none"),
        ("torch", "2.10.0", ""),  # named in the file, and no reason
    ],
)
def test_other_releases_are_ignored_by_name(machine, name, release, here):
    machine({GPU: entry_of(releases=entry_of()["releases"] | {name: release})})
    ignored = (
        f"the calibration of 2026-11-21 is ignored: it was measured with {name} {release or '(none)'}, but {here} is installed; "
        "run `nf4-patch calibrate` again"
    )
    assert calibrated.in_force(0).status == (ignored if here else TWO_SHAPES)
    assert bool(calibrated.in_force(0).rows) is not bool(here) and configs(0, [8]) == [None if here else CONFIG]


def broken(path, value):
    entry = copy.deepcopy(entry_of())
    *way, last = path
    functools.reduce(lambda inner, key: inner[key], way, entry)[last] = value
    return json.dumps({GPU: entry}).encode()


DAMAGED = {
    "empty": b"",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no entry": json.dumps({GPU: [1, 2]}).encode(),
    "no release": broken(["releases"], {"torch": "2.11.0"}),
    "no rows": broken(["matmul"], [4096]),
    "a shape": broken(["matmul", "4096"], ranges((8, CONFIG))),
    "a field": broken(["matmul", "4096x4096", 1, "config", "warps"], 4),
    "a missing field": broken(["matmul", "4096x4096", 1, "config"], {"tiles": 2}),
    "a zero": broken(["matmul", "4096x4096", 1, "config", "tiles"], 0),
    "a config that is not shipped": broken(["matmul", "4096x4096", 1, "config", "warps_k"], 5),
    "a huge number": broken(["matmul", "4096x4096", 1, "config", "tiles"], 10**400),
    "a number of too many digits": b'{"%s": 1%s}' % (GPU.encode(), b"0" * 5000),
    **{
        f"rows {m}": broken(["matmul", "4096x4096", 1, "m"], m)
        for m in (float("inf"), float("nan"), 1, True, 8.0, "8", None, [8])
    },
    "tiles Infinity": broken(["matmul", "4096x4096", 1, "config", "tiles"], float("inf")),
    "bytes": b"\xff",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_ignored(machine, content):
    file = machine(content)
    assert calibrated.in_force(0).status.startswith(f"{file} is ignored because it is damaged: ")
    assert calibrated.in_force(0).rows == {} and configs(0, [8]) == [None]


def test_it_is_read_once_at_the_first_question(machine, tmp_path):
    file = machine(b"")
    file.write_text(json.dumps({GPU: entry_of()}))
    assert configs(0, [8]) == [CONFIG]
    file.unlink()
    calibrated.use(SimpleNamespace(calibration=file))  # enable() again
    assert calibrated.in_force(0).status == TWO_SHAPES and configs(0, [2]) == [CONFIG]
    calibrated.forget()
    assert calibrated.in_force(0).status == ""  # no file, no word
    calibrated.use(SimpleNamespace(calibration=tmp_path))
    assert calibrated.in_force(0).status == f"{tmp_path} is ignored: Is a directory"


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        ({}, "~/.cache/nf4_patch/calibration.json"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/nf4_patch/calibration.json"),
        ({"NF4_PATCH_CALIBRATION": "/Some/File.json"}, "/Some/File.json"),
        ({"NF4_PATCH_CALIBRATION": "~/File.json"}, "~/File.json"),
        ({"NF4_PATCH_CALIBRATION": "OFF"}, None),
    ],
)
def test_the_variable(variables, file):
    assert Config.read(variables).calibration == (file and Path(file).expanduser())


@pytest.mark.parametrize("bad", ["1", "/some/directory"])
def test_the_variable_takes_nothing_else(bad):
    with pytest.raises(ConfigError, match=rf"NF4_PATCH_CALIBRATION='{bad}' .*allowed: auto, off, a path to a .json, "):
        Config.read({"NF4_PATCH_CALIBRATION": bad})


def test_enable_says_which_file(machine, monkeypatch):
    file = machine({GPU: entry_of()})
    calibrated.use(SimpleNamespace(calibration=None))
    for name, status in ((str(file), TWO_SHAPES), ("off", "")):
        monkeypatch.setenv("NF4_PATCH_CALIBRATION", name)
        nf4_patch.enable()
        assert calibrated.in_force(0).status == status


def test_the_releases_are_those_installed():
    assert calibrated.releases().keys() == RELEASES.keys() and calibrated.releases()["bitsandbytes"] is not None


def test_doctor_says_what_holds_for_a_gpu(machine, monkeypatch):
    """The generation decides about the kernel and bf16, the calibration or the tables about the fused matmul."""
    compiled = SimpleNamespace(entry=SimpleNamespace(launch_path="launcher"))
    monkeypatch.setattr(doctor.compilation, "kernel_for", lambda variant, device: compiled)

    def examined(major, minor):
        properties = SimpleNamespace(name=NAMES[0], total_memory=24 * 2**30, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return doctor.examine_gpu(0, lambda *_: None)

    machine({})
    volta, turing, ada, hopper = examined(7, 0), examined(7, 5), examined(*ADA), examined(9, 0)
    assert volta.failures == [Reason.GPU_TOO_OLD.sentence]
    assert turing.kernels["float16"] == "launcher" and not turing.failures and "fp16" in turing.advice
    assert ada.kernels == turing.kernels and ada.advice == hopper.advice == ""
    assert ada.fused_matmul == "not in the shipped tables; run `nf4-patch calibrate` to measure it"
    assert hopper.fused_matmul == "by the shipped tables"
    machine({GPU: entry_of()})
    assert examined(*ADA).fused_matmul == TWO_SHAPES
