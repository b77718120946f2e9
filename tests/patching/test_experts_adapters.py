"""What unsloth_zoo's and axolotl's adapters decide, without those libraries: the original here is bitsandbytes.

With the real ones: test_unsloth_experts.py, test_axolotl.py.
"""

from __future__ import annotations

import copy

import bitsandbytes.functional as F
import pytest
import torch
from target import target_like
from tiny_experts import DEVICE

from nf4_patch.patching.adapters import axolotl, unsloth_zoo
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch

SHAPE = (4, 64, 256)  # an expert is a block of the second level
TARGETS = {"unsloth_zoo.test.test", "axolotl.test.test"}


@pytest.fixture(autouse=True)
def all_of_ours(on, monkeypatch):
    monkeypatch.setattr(switch, "defer", "never")


def stack(nested=True, shape=SHAPE, quant_type="nf4"):
    torch.manual_seed(0)
    return F.quantize_4bit(torch.randn(shape).bfloat16().to(DEVICE), quant_type=quant_type, compress_statistics=nested)


def counted() -> dict[Reason, int]:
    return {reason: n for (target, reason), n in counters.fallbacks.items() if target in TARGETS}


def damaged(state, **fields):
    state = copy.copy(state)
    vars(state).update(fields)
    return state


# --- unsloth_zoo ---


class Original:
    """unsloth_zoo's function, as far as it matters: what it was given is what it answers."""

    def __init__(self) -> None:
        def nf4_dequant_triton(packed, quant_state, out_shape=None, out=None):
            return "the original", packed, quant_state, out_shape, out

        self.function = unsloth_zoo.nf4_dequant(target_like("unsloth_zoo"), nf4_dequant_triton)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_unsloth_zoo_decodes_whatever_shape_is_asked_for(nested):
    packed, state = stack(nested)
    want, ours = F.dequantize_4bit(packed, state), Original()
    assert torch.equal(ours(packed, state), want) and torch.equal(ours(packed, state, SHAPE), want)
    assert torch.equal(ours(packed, state, (256, 256)), want.view(256, 256))
    assert torch.equal(ours(packed.view(1, -1), state, SHAPE), want)
    assert torch.equal(ours(packed.view(4, -1), state, SHAPE), want)
    out = torch.empty_like(want)
    assert ours(packed, state, SHAPE, out).data_ptr() == out.data_ptr() and torch.equal(out, want)
    assert sum(map(counters.hits, TARGETS)) == 6 and not counted()


NOT_OURS = {
    "another number of elements": (lambda p, s: (p, s, (4, 64, 128)), Reason.SIZE_MISMATCH),
    "that number, into out": (
        lambda p, s: (p, s, (4, 64, 128), torch.zeros(SHAPE, dtype=torch.bfloat16, device=DEVICE)),
        Reason.SIZE_MISMATCH,
    ),
    "a state without a shape": (lambda p, s: (p, damaged(s, shape=None), SHAPE), Reason.SIZE_MISMATCH),
    "no state": (lambda p, s: (p, None, SHAPE), Reason.NOT_4BIT),
    "no weight": (lambda p, s: (None, s, SHAPE), Reason.ARGUMENTS),
    "out of another dtype": (lambda p, s: (p, s, SHAPE, torch.zeros(SHAPE, device=DEVICE)), Reason.OUT_MISMATCH),
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_what_goes_on_to_unsloth_zoo_is_untouched(case):
    make, reason = NOT_OURS[case]
    args = make(*stack())
    answer = Original()(*args)
    assert answer[0] == "the original" and counted() == {reason: 1}
    assert all(given is got for given, got in zip(args, answer[1:], strict=False))
    assert len(args) < 4 or not args[3].any()


@pytest.mark.parametrize("defer", ["always", "auto"])
def test_unsloth_zoo_keeps_its_own(defer, monkeypatch):
    monkeypatch.setattr(switch, "defer", defer)
    monkeypatch.setattr(unsloth_zoo, "deferred", lambda library, compiling: library == "unsloth_zoo" and not compiling)
    assert Original()(*stack())[0] == "the original" and counted() == {Reason.DEFERRED: 1}


def test_unsloth_zoo_without_out():
    """Before 2026.10.7."""
    replaced = unsloth_zoo.nf4_dequant(
        target_like("unsloth_zoo"), lambda packed, quant_state, out_shape=None: "the original"
    )
    assert replaced(None, None) == "the original"


# --- axolotl ---


def selective(packed, state, ids, shape=SHAPE[1:]):
    """What the replacement answers, and what the original does, where it ran."""
    used = []

    def _selective_dequant_bnb4(raw_param, quant_state, active_experts, expert_shape):
        used.append((raw_param, quant_state, active_experts, expert_shape))
        return "the original"

    result = axolotl.selective_dequant(target_like("axolotl"), _selective_dequant_bnb4)(packed, state, ids, shape)
    assert all(given is got for given, got in zip((packed, state, ids, shape), *used, strict=True)) if used else True
    return result


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_axolotl_decodes_the_experts_that_are_used(dtype, nested, quant_type):
    packed, state = stack(nested, quant_type=quant_type)
    whole = F.dequantize_4bit(packed, state)
    for ids in ([3, 0], [2], [0, 1, 2, 3]):
        assert torch.equal(selective(packed, state, torch.tensor(ids, dtype=dtype, device=DEVICE)), whole[ids])
    assert sum(map(counters.hits, TARGETS)) == 3 and not counted()


AXOLOTLS = {
    "no state": (lambda p, s: (p, None), Reason.NOT_4BIT),
    "a tensor for a state": (lambda p, s: (p, s.absmax), Reason.NOT_4BIT),
    "experts of another shape": (lambda p, s: (p, damaged(s, shape=torch.Size((2, 128, 256)))), Reason.EXPERT_BLOCKS),
    "a shard": (lambda p, s: (p[: p.numel() // 2], s), Reason.EXPERT_BLOCKS),
    "a shard of the scales": (lambda p, s: (p, damaged(s, absmax=s.absmax[:-1])), Reason.EXPERT_BLOCKS),
    "a shard of the second level": (
        lambda p, s: (p, damaged(s, state2=damaged(s.state2, absmax=s.state2.absmax[:-1]))),
        Reason.EXPERT_BLOCKS,
    ),
    "stored as bf16": (lambda p, s: (p.view(-1).view(torch.bfloat16).view(-1, 1), s), Reason.EXPERT_BLOCKS),
    "experts smaller than a block": (lambda p, s: stack(shape=(8, 32, 256)), Reason.EXPERT_BLOCKS),
}


@pytest.mark.parametrize("case", AXOLOTLS)
def test_what_goes_on_to_axolotl_is_untouched(case):
    make, reason = AXOLOTLS[case]
    packed, state = make(*stack())
    shape = (32, 256) if "smaller" in case else SHAPE[1:]
    assert selective(packed, state, torch.tensor([1], device=DEVICE), shape) == "the original"
    assert counted() == {reason: 1}


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_axolotl_keeps_its_own(nested, monkeypatch):
    monkeypatch.setattr(switch, "defer", "auto")
    monkeypatch.setattr(axolotl, "deferred", lambda library: library != "axolotl")
    result = selective(*stack(nested), torch.tensor([1], device=DEVICE))
    assert isinstance(result, torch.Tensor) is nested and counted() == ({} if nested else {Reason.DEFERRED: 1})
    monkeypatch.setattr(axolotl, "deferred", lambda library: library == "axolotl")
    assert selective(*stack(nested), torch.tensor([1], device=DEVICE)) == "the original"
