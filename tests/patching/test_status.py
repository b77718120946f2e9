"""status() shows what ran, what each option did, and what is wrong. As data, it shows everything."""

from __future__ import annotations

import contextlib
import json
import logging

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from target import row

import nf4_patch
from nf4_patch import snapshot
from nf4_patch.cache.option import Uncached
from nf4_patch.cache.store import cache
from nf4_patch.graphs.layers import graphs  # status() asks this module
from nf4_patch.libraries.bitsandbytes.adapters import COMPUTES_IN_FP32
from nf4_patch.options import OPTIONS
from nf4_patch.patching import counters, effects, hooks
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.state import State
from nf4_patch.patching.targets import TARGETS
from nf4_patch.snapshot import CacheStatus, Status, TargetStatus, WeightStatus
from nf4_patch.tools import doctor

DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
LAYER = "transformers.modeling_layers.GradientCheckpointingLayer.__call__"


def lines() -> list[str]:
    return str(nf4_patch.status()).split("\n")


@pytest.fixture(autouse=True)
def finds_a_gpu(monkeypatch):
    """Let status() find a GPU, because the tests' kernels also run without one."""
    monkeypatch.setattr(snapshot, "gpus", lambda: 1)


@pytest.fixture
def weight(device):
    return F.quantize_4bit(torch.randn(64, 64, device=device), quant_type="nf4", compress_statistics=True)


def test_before_the_first_call_one_line_says_what_is_ready(on):
    first, second = lines()
    assert first == "nf4_patch is on: 0 dequantizations in the kernel, 0 fell back"
    patched = sum(target.state is State.PATCHED for target in nf4_patch.status().targets)
    assert second.startswith(f"  nothing was called yet; {patched} functions are replaced")
    assert row(DEQUANTIZE).note == "installed, never called by eager code"
    nf4_patch.enable(cache="1MiB")
    assert row("bitsandbytes.autograd._functions.MatMul4Bit.forward").note == "it only observes"


def test_afterwards_those_that_were_called(patched, weight):
    for _ in range(3):
        F.dequantize_4bit(*weight)
    assert lines() == [
        "nf4_patch is on: 3 dequantizations in the kernel, 0 fell back", f"  {DEQUANTIZE}: patched, 3 hits"
    ]  # fmt: skip
    (shape,) = nf4_patch.status().shapes
    assert shape == WeightStatus((64, 64), "float32", "", hits=3, weights=0)  # no parameter


def test_a_fallback_has_its_line_with_its_reason(on, weight):
    packed, state = weight
    state.absmax = state.absmax.to(torch.float64)
    with contextlib.suppress(Exception):  # whatever bitsandbytes says to such a state
        F.dequantize_4bit(packed, state)
    assert lines()[0].endswith(" 0 dequantizations in the kernel, 1 fell back")
    assert lines()[1] == f"  {DEQUANTIZE}: patched, 0 hits (every counted call ran the original)"
    assert lines()[2].startswith("    1 x STATE_FIELDS: ")


def test_an_expected_fallback_of_a_dequantization_is_not_counted_in_the_first_line(on):
    for reason in (Reason.NOT_4BIT, Reason.STATE_FIELDS, Reason.NOT_4BIT):
        counters.counters.fall_back(DEQUANTIZE, reason, strict=False)
    assert nf4_patch.status().fallbacks == 1 and lines()[0].endswith(", 1 fell back")
    assert row(DEQUANTIZE).fallbacks == {"NOT_4BIT": 2, "STATE_FIELDS": 1}


def test_calls_of_an_option_are_not_added_to_dequantizations(on):
    """Count an expected Reason and another one. Both are in the option's line, and neither is in the first line."""
    name = "transformers.integrations.moe.ExpertsInterface._global_mapping.grouped_mm"
    nf4_patch.enable(experts="4bit")
    for reason in (Reason.EXPERT_PARALLEL, Reason.NOT_CUDA, Reason.EXPERT_PARALLEL):
        counters.counters.fall_back(name, reason, strict=False)
    assert lines()[0] == "nf4_patch is on: 0 dequantizations in the kernel, 0 fell back"
    assert lines()[1].startswith('  experts="4bit": 0 of 3 reads of experts, because 2 x EXPERT_PARALLEL: ')
    assert lines()[1].endswith(" (also 1 x NOT_CUDA)") and len(lines()) == 2
    assert row(name).fallbacks == {"EXPERT_PARALLEL": 2, "NOT_CUDA": 1}


def test_offload_without_a_model_says_what_to_do(patched, weight, caplog):
    """The status says it, and so does the log, once, at the end of a process that dequantized."""
    nf4_patch.enable(offload="all")
    said = 'offload="all": no packed weight is in host memory -> load a 4-bit model onto a GPU after the option is on'
    assert f"  {said}" in str(nf4_patch.status()).splitlines()
    effects.say("offload")
    assert not caplog.records  # nothing was called yet
    F.dequantize_4bit(*weight)
    for _ in range(2):
        effects.say("offload")
    assert [record.getMessage() for record in caplog.records if "offload" in record.getMessage()] == [
        f"nf4_patch: {said}"
    ]
    nf4_patch.enable(offload="off")
    assert "offload" not in str(nf4_patch.status())


def test_the_detail_of_a_reason_is_no_error(on):
    counters.counters.fall_back("target", Reason.GRAPH_MEMORY, strict=False, detail="graphs take 1 GiB")
    assert str(nf4_patch.status()).splitlines()[-1] == "  GRAPH_MEMORY: graphs take 1 GiB"


def test_what_is_called_beside_the_targets_has_a_line_too(on, weight):
    """Try the direct function, and an error of cache="auto"."""
    packed, state = weight
    for _ in range(2):
        nf4_patch.dequantize_nf4(packed, state)
    nf4_patch.enable(cache="auto")
    cache.auto.attempt(lambda: 1 / 0)
    text = str(nf4_patch.status())
    assert text.startswith("nf4_patch is on: 2 dequantizations in the kernel, 1 fell back\n")
    assert "  nf4_patch.dequantize_nf4: own, 2 hits\n  memory.spare: own, 0 hits\n    1 x INTERNAL_ERROR: " in text
    assert "  error: ZeroDivisionError: division by zero" in text
    assert [(t.name, t.hits) for t in nf4_patch.status().targets[len(TARGETS) :]] == [
        ("nf4_patch.dequantize_nf4", 2), ("memory.spare", 0)
    ]  # fmt: skip
    assert [target.name for target in doctor.examine().targets] == [target.name for target in TARGETS]
    with pytest.raises(ValueError, match="shape"):
        nf4_patch.dequantize_nf4(packed[:8], state)
    assert row("nf4_patch.dequantize_nf4").hits == 2


@pytest.mark.parametrize("state", State, ids=str)
def test_a_state_that_needs_attention_is_a_line(state):
    name = "transformers.integrations.moe.ExpertsInterface._global_mapping.grouped_mm"
    text = str(Status(True, (TargetStatus(DEQUANTIZE, State.PATCHED, 1), TargetStatus(name, state))))
    assert (name in text) == (state in (State.WRAPPED, State.DISPLACED, State.REFUSED))
    assert f"{state}" == state.value == json.loads(json.dumps(state))


def test_a_call_whose_backward_is_no_replay_counts_once(monkeypatch):
    """The forward of such a call was a replay, but the call counts as refused."""
    monkeypatch.setattr(graphs, "replays", 5)
    with nf4_patch.enabled(graphs="auto"):
        for _ in range(2):
            counters.counters.fall_back(LAYER, Reason.GRAPH_BACKWARD, strict=False)
        effect = nf4_patch.status().options["graphs"]
    assert (effect.used, effect.refused, effect.calls) == (3, {"GRAPH_BACKWARD": 2}, 5)


@pytest.mark.parametrize(("gpus", "hits", "said"), [(0, 0, True), (0, 1, False), (1, 0, False), (None, 0, False)])
def test_a_process_without_a_gpu_hears_it_before_the_first_call(gpus, hits, said, monkeypatch):
    text = str(Status(True, (TargetStatus(DEQUANTIZE, State.PATCHED, hits),), gpus=gpus))
    assert ("(NOT_CUDA)" in text.splitlines()[1]) == said
    assert "NOT_CUDA" not in str(Status(False, (), gpus=gpus))
    monkeypatch.undo()
    assert nf4_patch.status().gpus == torch.cuda.device_count()


def test_an_option_before_its_first_call():
    assert effects.line("lora", effects.Effect("fused")) == f'lora="fused": no {OPTIONS["lora"].calls} yet'


def test_as_data_nothing_is_left_out(on):
    data = json.loads(json.dumps(nf4_patch.status().as_dict()))
    assert [target["name"] for target in data["targets"]] == [target.name for target in TARGETS]
    assert {target["state"] for target in data["targets"]} <= {state.value for state in State}
    assert data["targets"][0]["state"] == "patched" and data["targets"][0]["found"] == ""
    assert data["options"]["lora"] == {"value": "off", "typed": False, "lacks": [], "used": 0, "refused": {}}


@pytest.mark.parametrize(
    ("cache", "text"),
    [(CacheStatus("auto"), 'cache="auto": empty'),
     (CacheStatus(str(6 * 2**30), {0: 2**30}, 28, 56, 28),
      'cache="6 GiB": 28 weights, 1 GiB on device 0; 56 of 84 reads served'),
     (CacheStatus(str(6 * 2**30), {0: 3 * 2**29, -1: 2**20}, 1, 2, 3),
      'cache="6 GiB": 1 weight, 1.5 GiB on device 0, 1 MiB on the CPU; 2 of 5 reads served'),
     (CacheStatus("auto", uncached={"WAITING": 2}), f"    2 x not cached: WAITING: {Uncached.WAITING.value}")],
)  # fmt: skip
def test_sizes_are_printed_as_people_write_them(cache, text):
    assert text in str(Status(True, (), cache=cache))
    assert "off (" not in str(Status(False, (), cache=cache))


# What a user is told in warnings, and in doctor.


@pytest.fixture
def said(caplog, monkeypatch):
    """Return the warnings so far. Earlier warnings may be repeated."""
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
    """Such a variable always wins, even if the patch was on before."""
    for name, value in (others | {variable: "0"}).items():
        monkeypatch.setenv(name, value)
    assert nf4_patch.enable() is nf4_patch.is_enabled() is False and not hasattr(F.dequantize_4bit, "__wrapped__")
    assert f"nf4_patch stays off: {variable}=0" in said()
    assert str(nf4_patch.status()).startswith(f"nf4_patch is off ({variable}=0): ")
    assert f"{variable}=0 keeps the patch off" in doctor.examine().problems()


def test_load_in_4bit_alone_computes_in_fp32(linear_op, caplog):
    """transformers uses this compute dtype without bnb_4bit_compute_dtype."""
    transformers = pytest.importorskip("transformers")
    assert transformers.BitsAndBytesConfig(load_in_4bit=True).bnb_4bit_compute_dtype is torch.float32
    counters.warn_once.cache_clear()
    nf4_patch.enable()
    for dtype, slow in ((torch.bfloat16, False), (torch.float32, True)):
        layer = (
            bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=dtype)
            .to(torch.bfloat16)
            .to(linear_op)
        )
        x = torch.randn(600, 128, dtype=torch.bfloat16, device=linear_op)
        for _ in range(2):
            assert layer(x).dtype is torch.bfloat16
        said = [record.getMessage() for record in caplog.records]
        assert said.count(COMPUTES_IN_FP32) == slow
