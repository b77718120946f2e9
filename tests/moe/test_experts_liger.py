"""Experts with Liger's forward: packed experts run transformers' grouped products, and experts in 16 bits run Liger's own."""

from __future__ import annotations

import pytest
import torch
import transformers
from alternation import crossed
from tiny_experts import DEVICE, LAYERS, experts_of, model_of, random_model, reasons, same, step, with_lora

pytest.importorskip("liger_kernel.ops.fused_moe", reason="Liger before 0.8")
from liger_kernel.transformers import monkey_patch, swiglu

from benchmarks.products import error
from nf4_patch.moe import launch
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

OTHERS = {"rope": False, "rms_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
modeling = transformers.models.qwen3_moe.modeling_qwen3_moe
LIGER = ".LigerExperts.forward"
ON = {"experts": "4bit"}


class Reference:
    """Compute what Liger's fused kernels compute, in PyTorch."""

    calls = 0

    @classmethod
    def apply(cls, x, gate_up, down, ids, weights):
        cls.calls += 1
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for k, expert in enumerate(ids[token].tolist()):
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                row = down[expert] @ (torch.nn.functional.silu(gate) * up)
                out = out.index_add(0, torch.tensor([token], device=x.device), (row * weights[token, k])[None])
        return out


@pytest.fixture
def liger(patched, monkeypatch):
    """Liger's module, with its kernels replaced by PyTorch. transformers' class is restored afterwards."""
    monkeypatch.setattr(swiglu, "LigerFusedMoEFunction", Reference)
    monkeypatch.setattr(Reference, "calls", 0)
    monkeypatch.setattr(modeling, "Qwen3MoeExperts", modeling.Qwen3MoeExperts)
    return monkey_patch.apply_liger_kernel_to_qwen3_moe


def by_class(liger, make):
    """Make transformers create Liger's experts class."""
    liger(**OTHERS)
    model = make()
    assert all("LigerExperts" in type(module).__name__ for module in experts_of(model))
    return model


def by_module(liger, make):
    """Give an existing model Liger's forward, as ``use_liger_kernel=True`` does."""
    model = make()
    liger(**OTHERS, model=model)
    assert all("forward" in vars(module) for module in experts_of(model))
    return model


def packed():
    return model_of("qwen3", torch.float32, lora=False)


@pytest.mark.every(2)
@pytest.mark.parametrize(("way", "own"), crossed((by_class, by_module), (False, True)))
def test_packed_experts_are_trained_as_without_liger(way, own, liger, monkeypatch):
    """Losses and gradients, including the adapters', equal those without Liger.

    With the PyTorch forward, they are bit-identical.
    """
    monkeypatch.setattr(launch, "supports", lambda tensor: False)
    want = step(with_lora(packed()), tokens=4)
    if own:
        monkeypatch.setattr(launch, "supports", lambda tensor: True)
    found = step(with_lora(way(liger, packed)), tokens=4)
    hits = sum(counter.hits for (name, *_), counter in counters.hit_counters.items() if name.endswith(LIGER))
    assert hits == 4 * LAYERS and Reference.calls == 0 and not reasons("LigerExperts.forward")
    assert {"loss"} < found.keys() == want.keys()
    assert max(error(found[key], want[key]) for key in want) < 1e-5 if own else same(found, want)


@pytest.mark.parametrize("way", [by_class, by_module])
def test_experts_in_16_bits_are_ligers_and_pefts(way, liger, patched):
    """The option changes nothing for experts in 16 bits."""
    model = with_lora(way(liger, lambda: random_model("qwen3", torch.float32, DEVICE)))
    found = step(model, tokens=4)
    assert Reference.calls == LAYERS and reasons("LigerExperts.forward") == {Reason.EXPERTS_NOT_PACKED: LAYERS}
    patched.disable()
    assert same(found, step(model, tokens=4))
