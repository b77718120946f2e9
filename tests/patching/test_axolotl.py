"""axolotl's decode of the experts that are used: what the adapter decides, and in the real axolotl bits, fallbacks, undo.

Of axolotl only the file and what it imports is loaded: the packages around it ask for its whole training stack.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import bitsandbytes.functional as F
import pytest
import torch
from subprocess_python import program
from target import target_like
from tiny_experts import DEVICE

from nf4_patch.patching.adapters import axolotl
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch

AXOLOTL = Path(sys.prefix) / "axolotl-0.19.0"
SHAPE = (4, 64, 256)  # an expert is a block of the second level
TARGET = "axolotl.test.test"


@pytest.mark.full
def test_axolotl(tmp_path):
    if not AXOLOTL.is_dir():
        assert not os.environ.get("CI"), "axolotl 0.19.0 is missing: scripts/test --rest installs it"
        pytest.skip("axolotl 0.19.0 is not installed: scripts/test --rest installs it")
    program("axolotl_experts", AXOLOTL, interpreted=not torch.cuda.is_available(), cwd=tmp_path)


@pytest.fixture
def all_of_ours(on, monkeypatch):
    monkeypatch.setattr(switch, "defer", "never")


def stack(nested=True, shape=SHAPE, quant_type="nf4"):
    torch.manual_seed(0)
    return F.quantize_4bit(torch.randn(shape).bfloat16().to(DEVICE), quant_type=quant_type, compress_statistics=nested)


def counted() -> dict[Reason, int]:
    return {reason: n for (target, reason), n in counters.fallbacks.items() if target == TARGET}


def damaged(state, **fields):
    state = copy.copy(state)
    vars(state).update(fields)
    return state


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
@pytest.mark.usefixtures("all_of_ours")
def test_axolotl_decodes_the_experts_that_are_used(dtype, nested, quant_type):
    packed, state = stack(nested, quant_type=quant_type)
    whole = F.dequantize_4bit(packed, state)
    for ids in ([3, 0], [2], [0, 1, 2, 3]):
        assert torch.equal(selective(packed, state, torch.tensor(ids, dtype=dtype, device=DEVICE)), whole[ids])
    assert counters.hits(TARGET) == 3 and not counted()


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
@pytest.mark.usefixtures("all_of_ours")
def test_what_goes_on_to_axolotl_is_untouched(case):
    make, reason = AXOLOTLS[case]
    packed, state = make(*stack())
    shape = (32, 256) if "smaller" in case else SHAPE[1:]
    assert selective(packed, state, torch.tensor([1], device=DEVICE), shape) == "the original"
    assert counted() == {reason: 1}


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.usefixtures("all_of_ours")
def test_axolotl_keeps_its_own(nested, monkeypatch):
    monkeypatch.setattr(switch, "defer", "auto")
    monkeypatch.setattr(axolotl, "deferred", lambda library: library != "axolotl")
    result = selective(*stack(nested), torch.tensor([1], device=DEVICE))
    assert isinstance(result, torch.Tensor) is nested and counted() == ({} if nested else {Reason.DEFERRED: 1})
    monkeypatch.setattr(axolotl, "deferred", lambda library: library == "axolotl")
    assert selective(*stack(nested), torch.tensor([1], device=DEVICE)) == "the original"
