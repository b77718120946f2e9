"""What a calibration remembers, without a GPU: the file, the GPU and releases that it holds for, and who reads it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calibration import ADA, CONFIG, GPU, NAMES, RELEASES, entry_of, row

import nf4_patch
from nf4_patch.config import Config, ConfigError
from nf4_patch.nf4.matmul import launch as matmul
from nf4_patch.nf4.matmul.tuning import ANY, SmallMConfig, SmallMRow
from nf4_patch.patching import calibrated, fused_matmul
from nf4_patch.patching.calibrated import releases
from nf4_patch.tools import doctor
from nf4_patch.tools.bench.timing import Machine

SHIPPED = SmallMConfig(1, 1, 4, True, 2)


def test_round_trip_for_this_gpu_and_these_sizes_only(machine):
    file = machine({GPU: entry_of()})
    assert [path.name for path in file.parent.iterdir()] == ["calibration.json"]  # no temporary file is left
    assert calibrated.in_force(0).status == "calibrated on 2026-11-21, 2 shapes"
    assert calibrated.in_force(1).status == ""
    assert calibrated.rows(0)[4096, 4096] == ((1, None), (8, CONFIG), (64, None))
    assert calibrated.rows(1) == {}

    found = [fused_matmul.config_for(0, m, 4096, 4096) for m in (1, 2, 8, 9, 64, 65)]
    assert found == [None, CONFIG, CONFIG, None, None, None]
    for n, k, device in ((4096, 4097, 0), (4095, 4096, 0), (8192, 4096, 0), (4096, 4096, 1)):
        assert fused_matmul.config_for(device, 8, n, k) is None
    assert matmul.config_for(ADA, 8, 4096, 4096) is None


def test_it_goes_before_the_shipped_table_where_it_measured(machine, monkeypatch):
    machine({GPU: entry_of()})
    monkeypatch.setattr(matmul, "SMALL_M_ROWS", (SmallMRow(ADA, 64, ANY, 1, SHIPPED),))
    assert [fused_matmul.config_for(0, m, 4096, 4096) for m in (1, 8, 64)] == [None, CONFIG, None]
    assert fused_matmul.config_for(1, 8, 4096, 4096) is SHIPPED
    assert fused_matmul.config_for(0, 8, 4096, 14336) is SHIPPED


def test_the_answers_that_were_remembered_follow_the_file(machine):
    """config_for and remembered products are resolved again when another file is used."""
    machine({GPU: entry_of()})
    assert fused_matmul.config_for(0, 8, 4096, 4096)
    assert not fused_matmul.config_for(0, 1, 4096, 4096) and not fused_matmul.config_for(1, 8, 4096, 4096)
    multiplier = fused_matmul.FusedMatmul("test")
    multiplier.launches["a weight"] = None
    calibrated.use(SimpleNamespace(calibration=None))
    assert not fused_matmul.config_for(0, 8, 4096, 4096)
    assert not multiplier.launches


@pytest.mark.parametrize(
    ("name", "release", "here"),
    [
        ("nf4_patch", "0.0.9", "0.1.0"),
        ("triton", "3.7.1", "3.6.0"),
        ("bitsandbytes", None, "0.50.2"),
        ("unsloth", "2026.10.9", "none"),
    ],
)
def test_other_releases_are_ignored_by_name(machine, name, release, here):
    entry = entry_of()
    entry["releases"][name] = release
    machine({GPU: entry})
    assert calibrated.in_force(0).status == (
        f"the calibration of 2026-11-21 is ignored: measured with {name} {release or '(none)'}, here is {here}; "
        "`nf4-patch calibrate` measures again"
    )
    assert calibrated.rows(0) == {}
    assert fused_matmul.config_for(0, 8, 4096, 4096) is None


def test_another_torch_is_named_and_no_reason(machine):
    entry = entry_of()
    entry["releases"]["torch"] = "2.10.0"
    machine({GPU: entry})
    assert calibrated.in_force(0).status.startswith("calibrated on")


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
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no entry": json.dumps({GPU: [1, 2]}).encode(),
    "no release": broken(["releases"], {"torch": "2.11.0"}),
    "no rows": broken(["matmul"], [4096]),
    "a shape": broken(["matmul", "4096"], [row(8, CONFIG)]),
    "a field": broken(["matmul", "4096x4096", 1, "config", "warps"], 4),
    "a missing field": broken(["matmul", "4096x4096", 1, "config"], {"tiles": 2}),
    "a text": broken(["matmul", "4096x4096", 1, "config", "tiles"], "1"),
    "a zero": broken(["matmul", "4096x4096", 1, "config", "tiles"], 0),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_ignored(machine, content):
    file = machine(content)
    assert calibrated.in_force(0).status.startswith(f"{file} is ignored, it is damaged: ")
    assert calibrated.rows(0) == {}
    assert not fused_matmul.config_for(0, 8, 4096, 4096)


def test_what_cannot_be_read_and_what_is_not_there(machine, tmp_path):
    calibrated.use(SimpleNamespace(calibration=tmp_path))
    assert calibrated.in_force(0).status == f"{tmp_path} is ignored: Is a directory"
    calibrated.use(SimpleNamespace(calibration=tmp_path / "none.json"))
    assert calibrated.in_force(0).status == ""


def test_it_is_read_once_and_not_before_the_first_question(machine, monkeypatch):
    asked = []
    load = calibrated.load
    monkeypatch.setattr(calibrated, "load", lambda path: asked.append(path) or load(path))
    file = machine({GPU: entry_of()})
    assert asked == []
    for m in (1, 8, 64):
        fused_matmul.config_for(0, m, 4096, 4096)
    calibrated.use(SimpleNamespace(calibration=file))  # enable() again
    calibrated.in_force(0)
    assert asked == [file]


def test_the_variable(monkeypatch, tmp_path):
    for environ, wanted in [
        ({}, "~/.cache/nf4_patch/calibration.json"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/nf4_patch/calibration.json"),
        ({"NF4_PATCH_CALIBRATION": "auto", "XDG_CACHE_HOME": "/c"}, "/c/nf4_patch/calibration.json"),
        ({"NF4_PATCH_CALIBRATION": "/Some/File.json"}, "/Some/File.json"),
        ({"NF4_PATCH_CALIBRATION": "~/File.json"}, "~/File.json"),
    ]:
        assert Config.read(environ).calibration == Path(wanted).expanduser()
    assert Config.read({"NF4_PATCH_CALIBRATION": "OFF"}).calibration is None
    for bad in ("1", "/some/directory"):
        with pytest.raises(
            ConfigError, match=rf"NF4_PATCH_CALIBRATION='{bad}' .*allowed: auto, off, a path to a .json, "
        ):
            Config.read({"NF4_PATCH_CALIBRATION": bad})


def test_enable_says_which_file(machine, monkeypatch):
    file = machine({GPU: entry_of()})
    calibrated.use(SimpleNamespace(calibration=None))
    assert releases().keys() == RELEASES.keys() and releases()["bitsandbytes"] is not None
    monkeypatch.setenv("NF4_PATCH_CALIBRATION", str(file))
    nf4_patch.enable()
    assert calibrated.in_force(0).status == "calibrated on 2026-11-21, 2 shapes"
    monkeypatch.setenv("NF4_PATCH_CALIBRATION", "off")
    nf4_patch.enable()
    assert calibrated.in_force(0).status == ""


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
