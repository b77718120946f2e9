"""What a calibration decides, remembers and forgets, without a GPU: the file, whom it holds for, and the rule behind a row."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from oracle import layout_of, quantized

from nf4_patch.config import Config, ConfigError
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.matmul import calibration
from nf4_patch.nf4.matmul import launch as matmul
from nf4_patch.nf4.matmul import reference as matmul_reference
from nf4_patch.nf4.matmul.tuning import ANY, SMALL_M_CANDIDATES, SMALL_M_ROWS, SmallMConfig, SmallMRow
from nf4_patch.patching import fused_matmul, hooks
from nf4_patch.patching.adapters import unsloth as unsloth_adapter
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.tools import doctor
from nf4_patch.tools.bench import calibrate
from nf4_patch.tools.bench import matmul as bench_matmul
from nf4_patch.tools.bench.peers import BITSANDBYTES, OURS, UNSLOTH_TRITON
from nf4_patch.tools.bench.record import Row, bits
from nf4_patch.tools.bench.timing import Machine, Times
from nf4_patch.tools.cli import main

ADA = (8, 9)
NAMES = {0: "NVIDIA GeForce RTX 4090", 1: "NVIDIA L40S"}
GPU = "NVIDIA GeForce RTX 4090, sm_89"
RELEASES = {"nf4_patch": "0.1.0", "triton": "3.6.0", "bitsandbytes": "0.50.2", "unsloth": None}
CONFIG = SmallMConfig(tiles=1, warps_n=1, warps_k=8, load_128bit=True, ctas_per_sm=2)


def row(m, config):
    return {
        "m": m,
        "config": config and config._asdict(),
        "us": {OURS: 10.0, BITSANDBYTES: 20.0 + m},
        "noise": 0.004,
    }


def entry_of(**changes):
    return {
        "date": "2026-11-21",
        "releases": {"torch": "2.11.0", **RELEASES},
        "dtype": "bfloat16",
        "matmul": {"4096x4096": [row(1, None), row(8, CONFIG), row(64, None)], "1024x4096": [row(8, CONFIG)]},
        "faster_eagerly": True,
        "dequantization": [],
        **changes,
    }


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs that no table knows; ``machine(entries)`` makes the file, which is then the one in use."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAMES[device])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: ADA)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    file = tmp_path / "cache" / "calibration.json"

    def use(entries):
        if isinstance(entries, dict):
            calibrate.write(file, entries)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(entries)
        calibration.use(file, lambda: RELEASES)
        hooks.forget_calibration()
        return file

    yield use
    calibration.use(None, lambda: RELEASES)
    hooks.forget_calibration()


def test_round_trip_for_this_gpu_and_these_sizes_only(machine):
    file = machine({GPU: entry_of()})
    assert [path.name for path in file.parent.iterdir()] == ["calibration.json"]  # no temporary file is left
    assert calibration.status(0) == "calibrated on 2026-11-21, 2 shapes"
    assert calibration.status(1) == ""
    assert calibration.rows(0)[4096, 4096] == ((1, None), (8, CONFIG), (64, None))
    assert calibration.rows(1) == calibration.rows(None) == {}
    assert (calibration.faster_eagerly(0), calibration.faster_eagerly(1)) == (True, None)

    found = [matmul.config_for(ADA, m, 4096, 4096, device=0) for m in (1, 2, 8, 9, 64, 65)]
    assert found == [None, CONFIG, CONFIG, None, None, None]
    for n, k, device in ((4096, 4097, 0), (4095, 4096, 0), (8192, 4096, 0), (4096, 4096, 1), (4096, 4096, None)):
        assert matmul.config_for(ADA, 8, n, k, device=device) is None


def test_it_goes_before_the_shipped_table_where_it_measured(machine):
    machine({GPU: entry_of()})
    shipped = (SmallMRow(ADA, 64, ANY, 1, "shipped"),)
    found = [matmul.config_for(ADA, m, 4096, 4096, shipped, 0) for m in (1, 8, 64)]
    assert found == [None, CONFIG, None]
    assert matmul.config_for(ADA, 8, 4096, 4096, shipped, 1) == "shipped"
    assert matmul.config_for(ADA, 8, 4096, 14336, shipped, 0) == "shipped"


def test_the_answers_that_were_remembered_follow_the_file(machine):
    """is_measured, measured_everywhere, kernels and remembered products are resolved anew when another file is used."""
    machine({GPU: entry_of()})
    assert fused_matmul.is_measured(0, 8, 4096, 4096)
    assert not fused_matmul.is_measured(0, 1, 4096, 4096) and not fused_matmul.is_measured(1, 8, 4096, 4096)
    assert unsloth_adapter.measured_everywhere()
    multiplier = fused_matmul.FusedMatmul(Dequantizer("test"))
    matmul._kernels["a size"] = multiplier.launches["a weight"] = None
    hooks.use_calibration(SimpleNamespace(calibration=None))
    assert not fused_matmul.is_measured(0, 8, 4096, 4096)
    assert not unsloth_adapter.measured_everywhere()
    assert "a size" not in matmul._kernels
    assert not multiplier.launches


def test_shipped_or_calibrated_decides_about_unsloths_kernel(machine, monkeypatch):
    monkeypatch.setattr(unsloth_adapter, "FASTER_EAGERLY", {ADA: "measured"})
    for calibrated, wanted in ((True, True), (False, False), (None, True)):
        machine({GPU: entry_of(faster_eagerly=calibrated)})
        assert unsloth_adapter.measured_everywhere() is wanted
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(unsloth_adapter, "FASTER_EAGERLY", {})
    machine({GPU: entry_of()})
    assert not unsloth_adapter.measured_everywhere()  # the second GPU is not in the file


@pytest.mark.parametrize(
    ("name", "release", "here"),
    [
        ("nf4_patch", "0.0.9", "0.1.0"), ("triton", "3.7.1", "3.6.0"), ("bitsandbytes", None, "0.50.2"),
        ("unsloth", "2026.10.9", "none"),
    ],
)  # fmt: skip
def test_other_releases_are_ignored_by_name(machine, name, release, here):
    entry = entry_of()
    entry["releases"][name] = release
    machine({GPU: entry})
    assert calibration.status(0) == (
        f"the calibration of 2026-11-21 is ignored: measured with {name} {release or '(none)'}, here is {here}; "
        "`nf4-patch calibrate` measures anew"
    )
    assert calibration.rows(0) == {} and calibration.faster_eagerly(0) is None
    assert matmul.config_for(ADA, 8, 4096, 4096, device=0) is None


def test_another_torch_is_named_and_no_reason(machine):
    entry = entry_of()
    entry["releases"]["torch"] = "2.10.0"
    machine({GPU: entry})
    assert calibration.status(0).startswith("calibrated on")


def broken(path, value):
    entry = copy.deepcopy(entry_of())
    *way, last = path
    inner = entry
    for key in way:
        inner = inner[key]
    inner[last] = value
    return json.dumps({GPU: entry}).encode()


DAMAGED = {
    "empty": b"",
    "cut": json.dumps({GPU: entry_of()}).encode()[:-30],
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no entry": json.dumps({GPU: [1, 2]}).encode(),
    "no date": json.dumps({GPU: {"releases": {}}}).encode(),
    "no release": broken(["releases"], {"torch": "2.11.0"}),
    "no rows": broken(["matmul"], [4096]),
    "a shape": broken(["matmul", "4096"], [row(8, CONFIG)]),
    "a field": broken(["matmul", "4096x4096", 1, "config", "warps"], 4),
    "a missing field": broken(["matmul", "4096x4096", 1, "config"], {"tiles": 2}),
    "a text": broken(["matmul", "4096x4096", 1, "config", "tiles"], "1"),
    "a zero": broken(["matmul", "4096x4096", 1, "config", "tiles"], 0),
    "no m": broken(["matmul", "4096x4096", 1], {"config": None}),
    "faster": broken(["faster_eagerly"], "yes"),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_ignored(machine, content):
    file = machine(content)
    assert calibration.status(0).startswith(f"{file} is ignored, it is damaged: ")
    assert calibration.rows(0) == {}
    assert calibration.faster_eagerly(0) is None
    assert not fused_matmul.is_measured(0, 8, 4096, 4096)


def test_what_cannot_be_read_and_what_is_not_there(machine, tmp_path):
    calibration.use(tmp_path, lambda: RELEASES)
    assert calibration.status(0) == f"{tmp_path} is ignored: Is a directory"
    calibration.use(tmp_path / "none.json", lambda: RELEASES)
    assert calibration.status(0) == ""


def test_it_is_read_once_and_not_before_the_first_question(machine, monkeypatch):
    asked = []
    load = calibration.load
    monkeypatch.setattr(calibration, "load", lambda path: asked.append(path) or load(path))
    file = machine({GPU: entry_of()})
    assert asked == []
    for m in (1, 8, 64):
        matmul.config_for(ADA, m, 4096, 4096, device=0)
    calibration.use(file, lambda: RELEASES)  # enable() again
    calibration.status(0)
    assert asked == [file]


def test_the_variable(monkeypatch, tmp_path):
    for environ, wanted in [
        ({}, "~/.cache/nf4_patch/calibration.json"), ({"XDG_CACHE_HOME": "/c"}, "/c/nf4_patch/calibration.json"),
        ({"NF4_PATCH_CALIBRATION": "auto", "XDG_CACHE_HOME": "/c"}, "/c/nf4_patch/calibration.json"),
        ({"NF4_PATCH_CALIBRATION": "/Some/File.json"}, "/Some/File.json"),
        ({"NF4_PATCH_CALIBRATION": "~/File.json"}, "~/File.json"),
    ]:  # fmt: skip
        from pathlib import Path

        assert Config.read(environ).calibration == Path(wanted).expanduser()
    assert Config.read({"NF4_PATCH_CALIBRATION": "OFF"}).calibration is None
    for bad in ("1", "/some/directory"):
        with pytest.raises(
            ConfigError, match=rf"NF4_PATCH_CALIBRATION='{bad}' .*allowed: auto, off, a path to a .json, "
        ):
            Config.read({"NF4_PATCH_CALIBRATION": bad})


def test_enable_says_which_file(machine, monkeypatch):
    import nf4_patch

    file = machine({GPU: entry_of(releases={"torch": "2.11.0", **hooks.releases()})})
    calibration.use(None, dict)
    try:
        monkeypatch.setenv("NF4_PATCH_CALIBRATION", str(file))
        nf4_patch.enable()
        assert calibration.status(0) == "calibrated on 2026-11-21, 2 shapes"
        monkeypatch.setenv("NF4_PATCH_CALIBRATION", "off")
        nf4_patch.enable()
        assert calibration.status(0) == ""
    finally:
        nf4_patch.disable()


def test_doctor_and_every_header_of_the_bench_say_it(machine, monkeypatch):
    class Properties:
        name, total_memory, (major, minor) = NAMES[0], 24 * 2**30, ADA

    check = doctor.KernelCheck("float16", True, "launcher", 0.1)
    monkeypatch.setattr(doctor, "check_kernel", lambda dtype, device, capability: check)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    machine({GPU: entry_of()})
    assert doctor.examine_gpu(0, lambda *_: None).fused_matmul == "calibrated on 2026-11-21, 2 shapes"
    machine({})
    assert (
        doctor.examine_gpu(0, lambda *_: None).fused_matmul
        == "in no shipped table; `nf4-patch calibrate` measures them"
    )
    monkeypatch.setattr(Properties, "major", 9)
    monkeypatch.setattr(Properties, "minor", 0)
    assert doctor.examine_gpu(0, lambda *_: None).fused_matmul == "by the shipped tables"
    header = Machine("a GPU", "89", "580.1", "clocks", {"torch": "2.11.0"}, "calibrated on 2026-11-21, 2 shapes")
    assert str(header).splitlines()[-1] == "calibrated on 2026-11-21, 2 shapes"


# the rule


def point(m, ours, theirs, noise=0.0, config=CONFIG):
    def times(value):
        return Times((value, value * (1 + noise)) * 2)

    taken = {BITSANDBYTES: times(theirs), bench_matmul.DEQUANTIZE: times(100.0)}
    taken |= {} if ours is None else {OURS: times(ours)}
    return calibrate.Point(Row(f"M={m}", "us", taken, {}, sizes={"m": m}), config)


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
    table = SMALL_M_ROWS + SMALL_M_CANDIDATES
    for m in calibrate.ROWS:
        every, quick = calibrate.candidates(m, quick=False), calibrate.candidates(m, quick=True)
        assert every == list(dict.fromkeys(row.config for row in table if row.m >= m))
        assert quick and set(quick) <= set(every)
        for row in table:  # what is shipped for so many rows is tried
            if matmul.config_for(row.capability, m, row.n, min(row.k, 4096), table) is row.config:
                assert row.config in quick
    assert calibrate.candidates(65, quick=False) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are checked so")
def test_a_config_that_is_wrong_is_not_timed(monkeypatch):
    """The reference passes for a config; one weight that is off, or the sums, and it is named by what is wrong."""
    packed, state = quantized((256, 512), torch.bfloat16, "cpu")
    layout = layout_of(packed, state)
    dense, truth = reference.dequantize(layout), bench_matmul.exact(layout)
    x = torch.randn(8, 512).bfloat16()

    def check(change):
        def multiply(config, x, packed, state, out=None):
            result = change(matmul_reference.matmul(x, layout), int(x.count_nonzero()) == len(x))
            return result if out is None else out.copy_(result)

        monkeypatch.setattr(calibrate, "multiply", multiply)
        return calibrate.check(CONFIG, x, (packed, state), dense, truth)

    def one_bit(result, one_hot):
        result.view(torch.int16)[3, 5] ^= one_hot
        return result

    assert check(lambda result, one_hot: result).passed
    other = check(one_bit)
    assert not other.passed and other.found == "one-hot rows do not give the bits of dequantize"
    off = check(lambda result, one_hot: result if one_hot else result * 1.01)
    assert not off.passed and off.error == pytest.approx(0.01, rel=0.1)  # and the rounding to bf16


def eagerly(ours, theirs, same=True, noise=0.0):
    times = {OURS: Times((ours, ours * (1 + noise))), UNSLOTH_TRITON: Times((theirs,))}
    return Row("a call", "us", times, bits({UNSLOTH_TRITON: same}))


def test_unsloths_kernel_loses_its_calls_where_ours_is_never_slower():
    assert calibrate.faster([]) is None
    assert calibrate.faster([eagerly(10, 20), eagerly(100, 99)]) is True
    assert calibrate.faster([eagerly(10, 20), eagerly(100, 95)]) is False
    assert calibrate.faster([eagerly(100, 101)]) is False  # no slower is no gain
    assert calibrate.faster([eagerly(10, 10.5, noise=0.2)]) is False
    assert calibrate.faster([eagerly(10, 20), eagerly(10, 20, same=False)]) is False


# the command


def call(*arguments, file=None):
    environ = {} if file is None else {"NF4_PATCH_CALIBRATION": str(file)}
    return CliRunner().invoke(main, ["calibrate", *arguments], env=environ, catch_exceptions=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine with no GPU")
def test_without_a_gpu(tmp_path):
    for arguments in ((), ("--quick",), ("--forget",)):
        done = call(*arguments, file=tmp_path / "none.json")
        assert done.exit_code == 1
        assert "no NVIDIA GPU: nothing can be measured here" in done.output
    assert not (tmp_path / "none.json").exists()
    done = call("--show", file=tmp_path / "none.json")
    assert done.exit_code == 0
    assert f"NF4_PATCH_CALIBRATION names {tmp_path / 'none.json'}, which does not exist" in done.output
    done = CliRunner().invoke(
        main, ["calibrate", "--show"], env={"NF4_PATCH_CALIBRATION": "auto", "XDG_CACHE_HOME": str(tmp_path)}
    )
    assert f"nothing is remembered in {tmp_path / 'nf4_patch' / 'calibration.json'}" in done.output


@pytest.fixture
def with_a_gpu(machine, monkeypatch):
    """``measured`` stands for what a GPU would give."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    here = {"torch": "2.11.0", **hooks.releases()}
    asked = []

    def measure(shapes, quick, tell):
        asked.append((shapes, quick))
        rows = {f"{n}x{k}": [row(8, CONFIG)] for n, k in shapes}
        return entry_of(releases=here, matmul=rows), []

    monkeypatch.setattr(calibrate, "measure", measure)
    return machine, asked


def test_the_command_adds_to_what_the_same_releases_measured(with_a_gpu, tmp_path):
    machine, asked = with_a_gpu
    other = entry_of()
    file = machine({"another GPU, sm_80": other})
    assert call("--shape", "128x256", "--quick", file=file).exit_code == 0
    done = call("--shape", "64x64", file=file)
    assert asked == [([(128, 256)], True), ([(64, 64)], False)]
    written = json.loads(file.read_text())
    assert list(written) == ["another GPU, sm_80", GPU] and written["another GPU, sm_80"] == other
    assert list(written[GPU]["matmul"]) == ["128x256", "64x64"]
    assert f"{GPU} is remembered in {file}" in done.output and "2.80x" in done.output and "1 to 8" in done.output
    assert calibration.status(0) == "calibrated on 2026-11-21, 2 shapes"
    # of other releases nothing is kept
    written[GPU]["releases"]["triton"] = "2.0"
    machine(written)
    call("--model", "llama-1b", file=file)
    assert list(json.loads(file.read_text())[GPU]["matmul"]) == ["512x2048", "2048x2048", "8192x2048", "2048x8192"]
    shown = call("--show", file=file)
    assert f"{GPU}: calibrated on 2026-11-21, 4 shapes" in shown.output and "8192x2048" in shown.output
    assert "another GPU, sm_80: the calibration of 2026-11-21 is ignored" in shown.output
    assert call("--forget", file=file).exit_code == 0
    assert list(json.loads(file.read_text())) == ["another GPU, sm_80"]
    assert calibration.status(0) == ""


def test_a_damaged_file_is_replaced(with_a_gpu):
    machine, _ = with_a_gpu
    file = machine(b"{")
    assert "cannot be read" in call("--show", file=file).output
    assert call("--shape", "64x64", file=file).exit_code == 0
    assert calibration.status(0) == "calibrated on 2026-11-21, 1 shape"


def test_where_it_cannot_be_remembered_nothing_is_measured(with_a_gpu, tmp_path):
    _, asked = with_a_gpu
    (tmp_path / "file").write_text("")
    done = call("--shape", "64x64", file=tmp_path / "file" / "calibration.json")
    assert done.exit_code == 1 and not asked


def test_what_cannot_be_remembered_is_still_shown(with_a_gpu, monkeypatch, tmp_path):
    def full(path, entries):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(calibrate, "write", full)
    done = call("--shape", "64x64", file=tmp_path / "calibration.json")
    assert done.exit_code == 0
    assert "was not written: No space left on device" in done.output and "2.80x" in done.output


def test_a_wrong_config_fails_the_command(with_a_gpu, monkeypatch, tmp_path):
    wrong = "64x64, 8 rows, Config(): one-hot rows do not give the bits of dequantize"
    monkeypatch.setattr(calibrate, "measure", lambda shapes, quick, tell: (entry_of(), [wrong]))
    done = call(file=tmp_path / "calibration.json")
    assert done.exit_code == 1 and wrong in done.output


@pytest.mark.parametrize(
    ("arguments", "file", "message"),
    [
        ((), None, "NF4_PATCH_CALIBRATION=off"), (("--show", "--forget"), "x.json", "--show and --forget"),
        (("--shape", "4096"), "x.json", "--shape 4096: give it as NxK"),
        (("--shape", "64x65"), "x.json", "K a multiple of 64"),
    ],
)  # fmt: skip
def test_wrong_uses(arguments, file, message, with_a_gpu, tmp_path):
    done = call(*arguments, file=file and tmp_path / file)
    assert done.exit_code == 2 and message in done.output
