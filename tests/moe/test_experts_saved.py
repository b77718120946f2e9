"""Selective checkpointing and hooks on saved tensors keep nothing of the experts' forward that is written to, and nothing dense."""

from __future__ import annotations

import functools

import pytest
import tiny_experts
import torch
from alternation import crossed
from results import Results
from tiny_experts import LAYERS, chains_of, ids_of, model_of, reasons, same, with_lora
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint

from nf4_patch.libraries.transformers import experts as adapter
from nf4_patch.moe import launch

ON = {"experts": "4bit"}
step = functools.partial(tiny_experts.step, tokens=4)  # Triton's interpreter takes a second for the rows of a hundred


# Triton's interpreter is slow: in each run, one test has the kernels.
IN_PYTORCH = pytest.mark.parametrize(
    "ours", ["pytorch", pytest.param("kernels", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture(params=["kernels", "pytorch"])
def ours(request, patched, monkeypatch):
    """Run nf4_patch's forward with the kernels, also on a CPU, and in PyTorch."""
    monkeypatch.setattr(launch, "supports", lambda tensor: request.param == "kernels")
    return patched


def adapted(name, dtype=torch.float32):
    model = with_lora(model_of(name, dtype, lora=False))
    model.enable_input_require_grads()
    return model


# --- results that nobody writes into ---


# gpt-oss has a bias, Gemma 4 a gate that the kernel does not have; in a half precision prepare_model_for_kbit_training makes fp32 of a bias
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "implementation"), crossed(("gpt-oss", "qwen3", "gemma4"), ("grouped_mm", "batched_mm"))
)
def test_no_result_is_written_into(name, implementation, ours, monkeypatch):
    model, watched, forward = adapted(name), Results(), adapter.forward
    model.set_experts_implementation(implementation)

    def watching(*arguments):
        with watched:
            return forward(*arguments)

    monkeypatch.setattr(adapter, "forward", watching)
    with torch.set_grad_enabled(implementation == "grouped_mm"):
        model(input_ids=ids_of(4))
    assert len(watched.kept) > 20 and not watched.written_into()


MUST, MAY = checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
POLICIES = {
    "products": lambda name: any(each in name for each in ("mm", "grouped")),
    "sums": lambda name: "add" in name,
    "new tensors": lambda name: any(each in name for each in ("empty", "zeros", "clone", "index", "scatter", "sort")),
    "packed weights": lambda name: "nf4_patch" in name,
    "everything": lambda name: True,
}


def selective(policy, **options):
    def choose(context, op, *arguments, **keywords):
        return MUST if POLICIES[policy](str(op)) else MAY

    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, choose, **options)
    return {"use_reentrant": False, "context_fn": contexts}


@pytest.mark.every(3)
@IN_PYTORCH
@pytest.mark.parametrize(("name", "policy"), crossed(("qwen3", "gpt-oss", "gemma4"), POLICIES))
def test_selective_checkpointing(name, policy, ours):
    """Gradients equal those of a step without checkpointing.

    Only the experts are checkpointed, because transformers' layers write into results of ops.
    """
    model = adapted(name)
    plain = step(model)
    outermost = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for options in ({}, {"allow_cache_entry_mutation": True}):
        for module in outermost:
            run = functools.partial(type(module).forward, module)
            module.forward = functools.partial(checkpoint.checkpoint, run, **selective(policy, **options))
        assert same(step(model), plain)
    assert len(outermost) == LAYERS and not reasons()


@IN_PYTORCH
def test_selective_checkpointing_of_a_model(ours):
    model = adapted("qwen3")
    plain = step(model)
    model.gradient_checkpointing_enable(selective("products"))
    assert same(step(model), plain) and not reasons()


# --- hooks on saved tensors ---


class Hooks(saved_tensors_hooks):
    """Hooks that keep the saved tensors and return each once, as TRL's activation offloading does."""

    def __init__(self):
        self.kept, self.packed = {}, []

        def pack(tensor):
            self.packed.append(tensor.numel())
            self.kept[len(self.packed)] = tensor.clone()
            return len(self.packed)

        super().__init__(pack, lambda key: self.kept.pop(key))


AROUND = {
    "no checkpoint": None,
    "reentrant": {"use_reentrant": True},
    "recomputed": {"use_reentrant": False},
    "selective": selective("products"),
}


@pytest.mark.every(2)
@IN_PYTORCH
@pytest.mark.parametrize(("name", "around"), crossed(("qwen3", "gpt-oss"), AROUND))
def test_hooks_that_keep_what_is_saved_get_nothing_dense(name, around, ours):
    """The hooks get neither a dense nor a packed stack. Each tensor that they get is requested once."""
    model = adapted(name)
    plain, stacks = step(model), {chain.original.numel() for chain in chains_of(model)}
    sizes = stacks | {2 * size for size in stacks}  # packed, and dense
    if AROUND[around]:
        model.gradient_checkpointing_enable(AROUND[around])
    for hooks in (Hooks(), save_on_cpu()):
        with hooks:
            found = step(model)
        assert same(found, plain)
        if isinstance(hooks, Hooks):
            assert hooks.packed and not hooks.kept and not sizes & {*hooks.packed}
    assert not reasons()
