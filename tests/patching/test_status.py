"""What status() shows: what was used and what is wrong in full, all other targets in one line; as data, everything."""

from __future__ import annotations

import contextlib
import json
import logging
import re

import bitsandbytes.functional as F
import pytest
import torch
from target import row

import nf4_patch
from nf4_patch.cache.option import Uncached
from nf4_patch.cache.store import cache
from nf4_patch.patching import counters, hooks
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.state import State
from nf4_patch.patching.targets import TARGETS
from nf4_patch.snapshot import CacheStatus, Status, TargetStatus, folded
from nf4_patch.tools import doctor

DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"


def rows() -> list[str]:
    """The lines of the status that name a target, and the one on all others."""
    return re.findall(r"^  (\S+\.\S+|\d+ more targets?): ", str(nf4_patch.status()), re.MULTILINE)


def counts() -> int:
    """How many targets the line on all others counts; its parts add up to it."""
    total, kinds = re.search(r"^  (\d+) more targets?: (.*)$", str(nf4_patch.status()), re.MULTILINE).groups()
    assert int(total) == sum(map(int, re.findall(r"(?:^|, )(\d+) ", kinds)))
    return int(total)


@pytest.fixture
def weight(device):
    return F.quantize_4bit(torch.randn(64, 64, device=device), quant_type="nf4", compress_statistics=True)


def test_before_the_first_call_every_installed_target_has_a_line(on):
    assert DEQUANTIZE in rows() and f"{DEQUANTIZE}: patched, 0 hits (installed, never called by eager code)" in str(
        nf4_patch.status()
    )
    never = [t.name for t in nf4_patch.status().targets if t.note == "installed, never called by eager code"]
    assert rows() == [*never, f"{counts()} more targets"]
    assert len(never) + counts() == len(TARGETS)
    nf4_patch.enable(cache="1MiB")
    assert row("bitsandbytes.autograd._functions.MatMul4Bit.forward").note == "it only observes"


def test_afterwards_those_that_were_called(patched, weight):
    for _ in range(3):
        F.dequantize_4bit(*weight)
    assert rows() == [DEQUANTIZE, f"{len(TARGETS) - 1} more targets"]
    assert counts() == len(TARGETS) - 1
    assert f"  {DEQUANTIZE}: patched, 3 hits\n" in str(nf4_patch.status())


def test_a_fallback_has_its_line_with_its_reason(on, weight):
    packed, state = weight
    state.absmax = state.absmax.to(torch.float64)
    with contextlib.suppress(Exception):  # whatever bitsandbytes says to such a state
        F.dequantize_4bit(packed, state)
    assert rows()[0] == DEQUANTIZE
    assert f"{DEQUANTIZE}: patched, 0 hits (every counted call ran the original)\n    1 x STATE_FIELDS: " in str(
        nf4_patch.status()
    )


def test_an_expected_reason_has_its_line_and_did_not_fall_back(on):
    name = "transformers.integrations.moe.ExpertsInterface._global_mapping.grouped_mm"
    for reason in (Reason.EXPERT_PARALLEL, Reason.NOT_CUDA, Reason.EXPERT_PARALLEL):
        counters.counters.fall_back(name, reason, strict=False)
    text = str(nf4_patch.status())
    assert text.startswith("nf4_patch is on: 0 in the kernel, 1 fell back\n")
    assert "    2 x EXPERT_PARALLEL: " in text and "    1 x NOT_CUDA: " in text
    assert row(name).fallbacks == {"EXPERT_PARALLEL": 2, "NOT_CUDA": 1} and nf4_patch.status().fallbacks == 1


def test_what_is_called_beside_the_targets_has_a_line_too(on, weight):
    """The direct function, and an error of cache="auto"."""
    packed, state = weight
    for _ in range(2):
        nf4_patch.dequantize_nf4(packed, state)
    nf4_patch.enable(cache="auto")
    cache.auto.attempt(lambda: 1 / 0)
    text = str(nf4_patch.status())
    assert text.startswith("nf4_patch is on: 2 in the kernel, 1 fell back\n")
    assert "  nf4_patch.dequantize_nf4: own, 2 hits\n  cache.auto: own, 0 hits\n    1 x INTERNAL_ERROR: " in text
    assert "  error: ZeroDivisionError: division by zero" in text
    assert [(t.name, t.hits) for t in nf4_patch.status().targets[len(TARGETS) :]] == [
        ("nf4_patch.dequantize_nf4", 2), ("cache.auto", 0)
    ]  # fmt: skip
    assert [target.name for target in doctor.examine().targets] == [target.name for target in TARGETS]
    with pytest.raises(ValueError, match="shape"):
        nf4_patch.dequantize_nf4(packed[:8], state)
    assert row("nf4_patch.dequantize_nf4").hits == 2


@pytest.mark.parametrize("state", State, ids=str)
def test_every_state_is_a_line_or_counted(state):
    target = TargetStatus(DEQUANTIZE, state)
    used = TargetStatus("transformers.integrations.moe.ExpertsInterface._global_mapping.grouped_mm", State.PATCHED, 1)
    shown, rest = folded([target, used])
    assert (target in shown) == (state in (State.WRAPPED, State.DISPLACED, State.REFUSED))
    assert rest.startswith("1 more target: 1 ") == (target not in shown)
    assert f"{state}" == state.value == json.loads(json.dumps(state))


def test_as_data_nothing_is_folded(on):
    data = json.loads(json.dumps(nf4_patch.status().as_dict()))
    assert [target["name"] for target in data["targets"]] == [target.name for target in TARGETS]
    assert {target["state"] for target in data["targets"]} <= {state.value for state in State}
    assert (
        data["targets"][0]["state"] == "patched"
        and data["targets"][0]["note"] == "installed, never called by eager code"
    )


@pytest.mark.parametrize(
    ("cache", "text"),
    [(CacheStatus("auto"), "cache auto: empty"),
     (CacheStatus(str(6 * 2**30), {0: 2**30}, 28, 56, 28),
      "cache 6 GiB: 28 weights, 1 GiB on device 0; 56 of 84 reads served"),
     (CacheStatus(str(6 * 2**30), {0: 3 * 2**29, -1: 2**20}, 1, 2, 3),
      "cache 6 GiB: 1 weight, 1.5 GiB on device 0, 1 MiB on the CPU; 2 of 5 reads served"),
     (CacheStatus("auto", uncached={"WAITING": 2}), f"    2 x not cached: WAITING: {Uncached.WAITING.value}")],
)  # fmt: skip
def test_sizes_are_printed_as_people_write_them(cache, text):
    assert text in str(Status(True, (), {}, (), cache))
    assert "off (" not in str(Status(False, (), {}, (), cache))


# What a user is told in warnings, and in doctor.


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings so far; what was said once before may be said again."""
    monkeypatch.setattr(hooks, "warn_once", counters.warn_once.__wrapped__)
    caplog.set_level(logging.WARNING, "nf4_patch")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def test_errors_are_importable_from_the_package():
    from nf4_patch.cache.store import StaleWeightError
    from nf4_patch.patching.config import ConfigError
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


@pytest.mark.parametrize(
    ("variable", "others"), [("NF4_PATCH", {}), ("NF4_USE_TRITON", {}), ("NF4_USE_TRITON", {"NF4_PATCH": "1"})]
)
def test_what_keeps_the_patch_off_is_named(variable, others, on, monkeypatch, said):
    """It always wins, also where the patch was on before."""
    for name, value in (others | {variable: "0"}).items():
        monkeypatch.setenv(name, value)
    assert nf4_patch.enable() is nf4_patch.is_enabled() is False and not hasattr(F.dequantize_4bit, "__wrapped__")
    assert f"nf4_patch stays off: {variable}=0" in said()
    assert str(nf4_patch.status()).startswith(f"nf4_patch is off ({variable}=0): ")
    assert f"{variable}=0 keeps the patch off" in doctor.examine().problems()
