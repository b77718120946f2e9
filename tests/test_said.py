"""What a user is told: a variable that is misspelled, an option that a second call drops, a GPU that nobody measured."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

import nf4_patch
from nf4_patch.patching import counters, hooks
from nf4_patch.patching.status import CacheStatus, Status
from nf4_patch.tools import doctor


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings so far; what was said once before may be said again."""
    monkeypatch.setattr(hooks, "warn_once", counters.warn_once.__wrapped__)
    caplog.set_level(logging.WARNING, "nf4_patch")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def test_errors_are_importable_from_the_package():
    from nf4_patch.config import ConfigError
    from nf4_patch.patching.cache.store import StaleWeightError
    from nf4_patch.patching.counters import FallbackError

    errors = nf4_patch.ConfigError, nf4_patch.StaleWeightError, nf4_patch.FallbackError
    assert errors == (ConfigError, StaleWeightError, FallbackError)
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        nf4_patch.enabel  # noqa: B018


def test_an_unknown_variable_is_named(monkeypatch, said):
    monkeypatch.setenv("NF4_PATCH_CASHE", "6GiB")
    monkeypatch.setenv("NF4_PATCH_QUIET", "1")
    nf4_patch.enable()
    assert "no variable NF4_PATCH_CASHE; did you mean NF4_PATCH_CACHE?" in said()
    assert "no variable NF4_PATCH_QUIET" in said()
    assert any("NF4_PATCH_CASHE" in line for line in doctor.examine().variables)


@pytest.mark.parametrize("variable", ["NF4_PATCH", "NF4_USE_TRITON"])
def test_what_keeps_the_patch_off_is_named(variable, monkeypatch, said):
    monkeypatch.setenv(variable, "0")
    assert not nf4_patch.enable() and f"nf4_patch stays off: {variable}=0" in said()
    assert str(nf4_patch.status()).startswith(f"nf4_patch is off ({variable}=0): ")
    assert f"{variable}=0 keeps the patch off" in doctor.examine().problems()


def test_a_second_call_without_a_cache_says_what_it_drops(said):
    nf4_patch.enable(cache="6GiB")
    nf4_patch.enable(cache="off")
    with nf4_patch.enabled(cache="6GiB"), nf4_patch.enabled():
        pass
    assert not said()
    nf4_patch.enable(cache="6GiB")
    nf4_patch.enable()
    assert "without cache= dropped the weights that were cached: it was cache=6442450944" in said()


def test_a_cache_in_words():
    assert str(CacheStatus("auto")) == "cache auto: empty; 0 of 0 reads served"
    full = CacheStatus("6442450944", {0: 2**30}, 28, 56, 28, compiled=28)
    assert str(full) == "cache 6 GiB: 28 weights (28 for compiled layers), 1 GiB on device 0; 56 of 84 reads served"
    assert "off (" not in str(Status(False, (), {}, ()))


@pytest.fixture
def report(monkeypatch):
    """Of a machine with a GPU of this capability on which everything works."""

    def made(capability=(9, 0), **changes):
        monkeypatch.setattr(doctor, "why_no_gpu", lambda: "")
        check = doctor.KernelCheck("float16", True, "c entry", 0.1)
        gpu = doctor.Gpu(0, "a GPU", capability, 24.0, kernels=[check])
        found = doctor.DoctorReport("here", {"bitsandbytes": "0.50.2"}, [gpu], "", [], [], [])
        return dataclasses.replace(found, **changes)

    return made


def test_a_gpu_that_nobody_measured_is_ready(report):
    *_, verdict, speed = report((8, 9)).render()
    assert verdict.startswith("Ready: ") and "sm_89 is not measured: `nf4-patch bench --step peft`" in speed
    assert not any("not measured" in str(line) for line in report((9, 0)).render())


@pytest.mark.parametrize(
    ("releases", "problem"),
    [({}, "bitsandbytes is not installed"), ({"bitsandbytes": "0.42.0"}, "0.42.0 is too old: nf4_patch needs >= 0.43")],
)
def test_nothing_to_patch_is_not_ready(releases, problem, report):
    found = report(releases=releases)
    (only,) = found.problems()
    assert problem in only and found.exit_code == 1 and found.outcome is doctor.Outcome.NOT_READY


def test_an_import_that_fails_is_one_problem(report):
    target = doctor.TargetStatus(
        "bitsandbytes.functional.dequantize_4bit", doctor.State.REFUSED, note="import x fails: no"
    )
    other = dataclasses.replace(target, name="bitsandbytes.functional.gemv_4bit")
    assert report(targets=[target, other]).problems() == ["import x fails: no"]


def test_a_release_that_does_not_load_the_patch_is_named(monkeypatch):
    monkeypatch.setenv("NF4_PATCH", "1")
    monkeypatch.setattr(doctor, "release_of", lambda name: "0.45.5")
    (line,) = [line for line in doctor.variables_in_force(doctor.Config.read()) if "0.45.5" in line]
    assert "`nf4-patch run`" in line


def test_measured_gpus_are_those_of_the_data():
    files = (Path(__file__).parents[1] / "docs" / "data").glob("bench-*.json")
    found = {json.loads(file.read_text())["machine"]["capability"] for file in files}
    assert found == {f"{major}{minor}" for major, minor in doctor.compilation.MEASURED}
