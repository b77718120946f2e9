"""Decoder layers as CUDA graphs: every case trains twice, eagerly and with graphs, with bit-identical losses,
gradients, adapters and random numbers.

Otherwise the layers run eagerly under the Reason that the case names. Without a GPU, each graph is a function that runs
the layer (support/recorders.py). Everything except the capture is real.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes  # its import logs an error, and pytest's log would keep the frames of the test that imports it
import numpy
import pytest
import recorders
import torch
from alternation import crossed, thinned
from interrupts import at_line, lines_of
from torch import Tensor

import nf4_patch
from benchmarks.models import LINEARS, Shape, build_4bit, config_of
from benchmarks.training import optimizer_of, trained
from nf4_patch.activations.layers import FIRST_CALLS
from nf4_patch.cache.store import cache
from nf4_patch.graphs import calls as calls_module
from nf4_patch.graphs import capture, warmup
from nf4_patch.graphs import layers as graphs_module
from nf4_patch.graphs import recorder as recorder_module
from nf4_patch.graphs import recording as recording_module
from nf4_patch.graphs import shapes as shapes_module
from nf4_patch.graphs import steps as steps_module
from nf4_patch.graphs.arguments import Slot
from nf4_patch.graphs.capture import aligned
from nf4_patch.graphs.fingerprint import Fingerprint
from nf4_patch.graphs.layers import graphs
from nf4_patch.libraries.unsloth import CHECKPOINTING
from nf4_patch.memory import spare as spare_module
from nf4_patch.memory.spare import MemoryInfo, spare
from nf4_patch.memory.waits import Waits
from nf4_patch.moe import launch as experts_launch
from nf4_patch.nf4 import runtime
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

# Graphs run code of installed libraries only, such as the remote code that transformers loads.
FILE = Path(__file__).parents[1] / "support" / "remote" / "transformers_modules" / "activations.py"
SPEC = importlib.util.spec_from_file_location("transformers_modules.activations", FILE)
REMOTE = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(REMOTE)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LAYERS = 3 if GPU else 2
SHAPE = Shape(256, 512, LAYERS, 4, 2) if GPU else Shape(64, 128, LAYERS, 2, 1)
TARGET = "transformers.modeling_layers.GradientCheckpointingLayer.__call__"
LENGTH = 72  # more rows than are multiplied straight from the packed weight where nothing has a gradient
# Without a GPU, layers are recorded at their second call, so that trainings are shorter.
RECORDED_AT = shapes_module.RECORDED_AT if GPU else 2
EAGER = RECORDED_AT - 1  # calls of a shape before it is recorded
STEPS = 6 if GPU else 4
# In a training of LAST steps, something changes before the step CHANGE, and is undone before the step UNDO.
CHANGE, UNDO, LAST = (4, 7, 10) if GPU else (2, 4, 6)
ROLLOUTS, TOKENS = (4, 12) if GPU else (3, 6)


def model_of(
    reentrant: bool = False, inputs: bool = True, config: Any = None, targets: Any = LINEARS, **lora: Any
) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config or config_of(SHAPE, torch.bfloat16), DEVICE)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if inputs:
        model.enable_input_require_grads()
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(r=8, target_modules=list(targets), task_type="CAUSAL_LM", **lora))
    for parameter in trained(model):
        parameter.data = parameter.data.to(torch.bfloat16)
    for module in model.modules():  # bitsandbytes repacks weights in evaluation, where the CPU has AVX-512 bf16
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def layers_of(model: Any) -> Any:
    return model.base_model.model.model.layers


def tokens(step: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 500, (2, length), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def loss_of(model: Any, step: int, length: int = LENGTH, **arguments: Any) -> Tensor:
    ids = tokens(step, length)
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(input_ids=ids, labels=ids, **arguments).loss  # type: ignore[no-any-return]


def backward(*losses: Tensor) -> list[float]:
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def one_step(model: Any, optimizer: Any, step: int) -> list[float]:
    return backward(loss_of(model, step))


Step = Callable[[Any, Any, int], list[float]]


def run(model: Any, step_of: Step, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Train with these options, and return all numbers."""
    optimizer = optimizer_of(model, lr=1e-3)
    torch.manual_seed(3)
    losses, gradients = [], []
    counters.reset()
    before = graphs.replays
    with nf4_patch.enabled(**options):
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            losses += step_of(model, optimizer, step)
            gradients.append([None if p.grad is None else p.grad for p in trained(model)])  # kept, and not overwritten
            optimizer.step()
        status = nf4_patch.status()
    return {
        "losses": losses,
        "gradients": [[g if g is None else g.clone() for g in each] for each in gradients],
        "adapters": [p.detach().clone() for p in trained(model)],
        "random": torch.cuda.get_rng_state() if GPU else torch.get_rng_state(),
        "replays": graphs.replays - before,
        "reasons": {r.name for (target, r) in counters.fallbacks if target == TARGET},
        "status": status,
    }


def assert_same(eager: dict[str, Any], graphed: dict[str, Any]) -> None:
    assert graphed["losses"] == eager["losses"]
    for ours, theirs in zip(graphed["gradients"], eager["gradients"], strict=True):
        for g, e in zip(ours, theirs, strict=True):
            assert (g is None) == (e is None) and (g is None or torch.equal(g, e))
    for g, e in zip(graphed["adapters"], eager["adapters"], strict=True):
        assert torch.equal(g, e)
    assert torch.equal(graphed["random"], eager["random"])


def compared(
    make: Callable[[], Any], step_of: Step = one_step, steps: int = STEPS, base: Any = None, **graph_options: Any
) -> Any:
    torch.manual_seed(0)
    eager = run(make(), step_of, steps, **(base or {}))
    torch.manual_seed(0)
    graphed = run(make(), step_of, steps, **{**(base or {}), "graphs": "auto", **graph_options})
    assert_same(eager, graphed)
    return graphed


def record_at(call: int, monkeypatch: Any) -> None:
    for module in (shapes_module, graphs_module):
        monkeypatch.setattr(module, "RECORDED_AT", call)


@pytest.fixture
def at_the_third_call(monkeypatch):
    """Record layers at the third call, as for users."""
    record_at(3, monkeypatch)


@pytest.fixture
def frozen(monkeypatch):
    """Let no change of Python's state reach a replay, as in a CUDA graph."""
    if not GPU:
        recorders.install(monkeypatch, recorders.Operations)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)  # another test's: layers run eagerly beside it
    record_at(RECORDED_AT, monkeypatch)
    if not GPU:
        recorders.install(monkeypatch)
        # Triton's interpreter takes minutes for them
        monkeypatch.setattr(experts_launch, "supports", REMOTE.never)
    yield
    nf4_patch.disable()
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()


# --- modes ---


BASES = {
    "plain": {}, "fused": {"lora": "fused"}, "cached": {"cache": "1GiB"}, "cached, fused": {"cache": "1GiB", "lora": "fused"},
}  # fmt: skip


@pytest.mark.every(4)
@pytest.mark.parametrize(("base", "how"), crossed(BASES, itertools.product((False, True), (0.0, 0.05))), ids=str)
def test_training(base, how):
    base, (reentrant, dropout) = BASES[base], how
    found = compared(lambda: model_of(reentrant, lora_dropout=dropout), base=base)
    assert found["replays"] == LAYERS * (STEPS - EAGER)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"}
    if "cache" in base:
        assert found["status"].cache.hits > LAYERS * 7 * 2 * (STEPS - EAGER - 1)


def with_free_memory(monkeypatch: Any) -> None:
    """Give ``"auto"`` memory to share, also on a machine without a GPU, and beside other processes."""
    monkeypatch.setattr(MemoryInfo, "of", classmethod(lambda cls, device: cls(2**34, 0, 0, 0)))
    if not GPU:
        monkeypatch.setattr(runtime, "devices_in_use", lambda: [-1])
        monkeypatch.setattr(runtime, "empty_cache", lambda: None)
        monkeypatch.setattr(runtime, "allocation_retries", lambda device: 0)


@pytest.mark.parametrize("options", [{}, {"activations": "auto"}], ids=["recomputed", "kept"])
def test_layers_fill_the_cache_when_they_are_recorded(options, frozen, at_the_third_call, monkeypatch):
    """``cache="auto"`` gets its budget after two steps, when the layers are recorded and never run eagerly again."""
    with_free_memory(monkeypatch)
    found = compared(model_of, steps=6, base=options | {"cache": "auto"})
    assert found["replays"] == LAYERS * 4
    assert found["status"].cache.weights == LAYERS * 7
    assert found["status"].cache.hits >= LAYERS * 7 * 6  # those without graphs are fewer
    assert found["status"].activations.mode == "off" or found["status"].activations.layers == LAYERS


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("options", [{}, {"activations": "auto"}], ids=["recomputed", "kept"])
def test_layers_are_recorded_again_when_the_cache_gets_its_budget(options, evaluates, frozen, monkeypatch):
    """With gradient accumulation, layers are recorded in the first training step, before ``"auto"`` has a budget.

    The cache may also get its budget in an evaluation.
    """

    def step_of(model, optimizer, step):
        if evaluates:
            spare.observe(torch.zeros(2, LENGTH, SHAPE.hidden_size, device=DEVICE))  # as linear layers do
        return [loss for part in range(RECORDED_AT) for loss in backward(loss_of(model, RECORDED_AT * step + part))]

    with_free_memory(monkeypatch)
    found = compared(model_of, step_of, steps=4, base=options | {"cache": "auto"})
    assert found["status"].cache.weights == LAYERS * 7
    assert found["replays"] >= LAYERS * (RECORDED_AT * 4 - EAGER - RECORDED_AT)


def test_layers_are_recorded_again_each_time_the_cache_gave_its_memory_back(frozen, at_the_third_call, monkeypatch):
    """Layers that change run eagerly for longer and longer. These layers do not change."""

    def step_of(model, optimizer, step):
        if step in (5, 8):
            spare.give_back(Waits.MEMORY, 0, 0)
        return one_step(model, optimizer, step)

    with_free_memory(monkeypatch)
    assert compared(model_of, step_of, steps=12, base={"cache": "auto"})["replays"] == LAYERS * 6


def test_no_graphs_are_dropped_during_a_recording(frozen, monkeypatch):
    """Free memory runs short in the warm-up. A drop would let the recording overwrite activations that earlier layers keep."""
    with_free_memory(monkeypatch)
    monkeypatch.setattr(spare_module, "SECONDS", 0)
    short = classmethod(lambda cls, device: cls(0 if cache.pinning != -1 else 2**34, 0, 0, 2**20))
    monkeypatch.setattr(MemoryInfo, "of", short)
    found = compared(model_of, steps=6, base={"activations": "auto", "cache": "auto"})
    assert found["status"].activations.layers == LAYERS and found["status"].cache.weights == LAYERS * 7


def test_layers_are_recorded_if_the_cache_runs_out_of_memory(frozen, at_the_third_call, monkeypatch):
    def fill(less):
        with monkeypatch.context() as patched:
            patched.setattr(cache, "decoded", raises)
            assert cache.missed
            return whole(less)

    def raises(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with_free_memory(monkeypatch)
    whole = cache.fill
    monkeypatch.setattr(cache, "fill", fill)
    found = compared(model_of, steps=4, base={"cache": "auto"})
    assert found["replays"] == LAYERS * 2
    assert found["status"].cache.weights == 0 and not found["status"].cache.waits


@pytest.mark.full
def test_without_autocast_and_with_fp32_adapters():
    def step_of(model, optimizer, step):
        ids = tokens(step)
        return backward(model(input_ids=ids, labels=ids).loss)

    def make():
        model = model_of()
        for parameter in trained(model):
            parameter.data = parameter.data.float()
        return model

    assert compared(make, step_of)["replays"]


@pytest.mark.full
def test_an_fp32_adapter_that_is_used_twice():
    """Autocast casts the adapter once, so its two gradients are added in bf16."""

    def make():
        model = model_of(
            config=config_of(SHAPE._replace(num_key_value_heads=SHAPE.num_attention_heads), torch.bfloat16)
        )
        for layer in layers_of(model):
            layer.self_attn.k_proj = layer.self_attn.q_proj
        for parameter in trained(model):
            parameter.data = parameter.data.float()
        return model

    assert compared(make)["replays"] == LAYERS * (STEPS - EAGER)


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_inside_one_autocast_block(reentrant, at_the_third_call):
    """Autocast's cache makes a non-reentrant checkpoint add up the two gradients of an fp32 adapter in bf16. Graphs add in fp32."""

    def make():
        model = model_of(reentrant)
        for parameter in trained(model):
            parameter.data = parameter.data.float()
        return model

    def steps_of(caches):
        def step_of(model, optimizer, step):
            # The layers run eagerly in the first step.
            with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=caches or not step):
                losses = [model(input_ids=ids, labels=ids).loss for ids in (tokens(2 * step), tokens(2 * step + 1))]
            (losses[0] - 0.3 * losses[1]).backward()
            return [loss.item() for loss in losses]

        return step_of

    graphed = run(make(), steps_of(True), graphs="auto")
    # With a reentrant checkpoint, the second forward before a backward runs eagerly.
    assert graphed["replays"] == (1 if reentrant else 2) * LAYERS * (STEPS - 1)
    for caches in (False, True) if reentrant else (False,):
        assert_same(run(make(), steps_of(caches)), graphed)


@pytest.mark.full
def test_compiled_functions_are_not_compiled_again(monkeypatch):
    """Unsloth compiles functions of a layer. Dynamo would compile these again if a setting of autocast differed."""
    from torch._dynamo.utils import counters as found
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(LlamaRMSNorm, "forward", torch.compile(LlamaRMSNorm.forward, backend="eager"))
    run(model_of(), one_step)
    before = found["stats"]["unique_graphs"]
    assert compared(model_of)["replays"] == LAYERS * (STEPS - EAGER)
    assert before > 0 and found["stats"]["unique_graphs"] == before


def test_inputs_without_a_gradient():
    assert compared(lambda: model_of(inputs=False))["replays"] == LAYERS * (STEPS - EAGER)


@pytest.mark.full
def test_precision_of_matrix_products_in_its_two_forms():
    """PyTorch's older function raises an error after the precision was set for one backend."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert compared(model_of)["replays"] == LAYERS * (STEPS - EAGER)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_no_backend_that_supports_the_tensor_with_which_attention_is_settled(monkeypatch):
    """The script allows one backend only. On a CPU, there is no such backend."""
    if not GPU:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(runtime, "devices_in_use", lambda: [DEVICE])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        capture.settle_attention.__wrapped__()


@pytest.mark.full
def test_math_attention():
    """Math attention multiplies in fp32. If autocast were on during the capture of a backward, gradients would be rounded to bf16."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert compared(model_of)["replays"] == LAYERS * (STEPS - EAGER)


@pytest.mark.full
@pytest.mark.parametrize(
    ("reentrant", "how"), crossed((False, True), itertools.product(("MATH", "FLASH_ATTENTION"), (False, True)), every=3)
)
def test_a_backward_inside_autocast(how, reentrant):
    """Under autocast, the operands of a backward are rounded, for example in math attention."""
    backend, fp32 = how
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def make():
        model = model_of(reentrant)
        for parameter in trained(model):
            parameter.data = parameter.data.to(torch.float32 if fp32 else torch.bfloat16)
        return model

    def step_of(model, optimizer, step):
        with torch.autocast(DEVICE, torch.bfloat16):
            return backward(loss_of(model, step))

    with sdpa_kernel(getattr(SDPBackend, backend)):
        found = compared(make, step_of)
    assert found["replays"] == LAYERS * (STEPS - EAGER) and found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_BACKWARD"}


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_long_sequences_with_deterministic_algorithms(reentrant, monkeypatch):
    """The algorithms are deterministic, because flash attention otherwise adds up the gradients of long sequences in any order.

    PyTorch also fills new tensors with NaN in this mode, so nothing that a graph reads may be uninitialized.
    """
    length, steps = (1024, 16) if GPU else (LENGTH, STEPS)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by PyTorch
    torch.use_deterministic_algorithms(True)
    try:
        found = compared(
            lambda: model_of(reentrant), lambda model, optimizer, step: backward(loss_of(model, step, length)), steps
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert found["replays"] == LAYERS * (steps - EAGER) and found["reasons"] == {"GRAPH_NEW_SHAPE"}


@pytest.mark.full
def test_deterministic_algorithms_that_only_warn(monkeypatch):
    """With ``warn_only``, flash attention keeps its non-deterministic backward, so another graph is recorded."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by PyTorch

    def step_of(model, optimizer, step):
        torch.use_deterministic_algorithms(True, warn_only=step != CHANGE)
        return backward(loss_of(model, step))

    try:
        assert compared(model_of, step_of, LAST)["replays"] == LAYERS * (LAST - EAGER - 1)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.full
def test_attention_dropout():
    def make():
        config = config_of(SHAPE, torch.bfloat16)
        config.attention_dropout = 0.1
        return model_of(config=config)

    assert compared(make)["replays"]


# --- Unsloth's checkpoint ---


@pytest.fixture
def unsloth(monkeypatch):
    """Put PyTorch's reentrant checkpoint in place of Unsloth's, under the same names.

    Unsloth's own checkpoint needs a GPU, and programs/graphed_unsloth.py trains with it.
    """
    import transformers.modeling_utils

    module = torch.utils.checkpoint
    checkpoint = module.checkpoint

    @torch._disable_dynamo  # as the real one
    def unsloth_checkpoint(function, *arguments, use_reentrant=None, **options):
        return checkpoint(function, *arguments, use_reentrant=True, **options)

    unsloth_checkpoint.__module__ = CHECKPOINTING
    function = type("UnslothCheckpointFunction", (module.CheckpointFunction,), {"__module__": CHECKPOINTING})
    monkeypatch.setattr(module, "CheckpointFunction", function)
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", unsloth_checkpoint)


@pytest.mark.every(2)
@pytest.mark.parametrize("base", ["plain", "cached, fused"])
def test_unsloths_checkpoint(base, unsloth):
    found = compared(lambda: model_of(True, lora_dropout=0.05), base=BASES[base])
    assert found["replays"] == LAYERS * (STEPS - EAGER) and found["reasons"] == {"GRAPH_NEW_SHAPE"}


def test_inputs_that_unsloths_checkpoint_would_move_count_as_needed(unsloth, monkeypatch):
    """Without graphs, these inputs wait in host memory.

    So the first layer's recording leaves room for one input, and the third layer's for three.
    """
    left = []

    class Leaving(recorders.Rerun):
        def leaving_enough(self, more=0, held=0):
            left.append(more)
            return contextlib.nullcontext()

    monkeypatch.setattr(recording_module, "Recorder", Leaving)
    run(model_of(True), one_step, graphs="auto")
    nbytes = 2 * LENGTH * SHAPE.hidden_size * 2
    assert left == [nbytes * (1 + index) for index in range(LAYERS)]


@pytest.mark.full
def test_unsloths_checkpoint_rounds_fp32(unsloth):
    """Unsloth's checkpoint moves an fp32 input to the host in bf16, so the layer runs eagerly."""

    def step_of(model, optimizer, step):
        ids = tokens(step)
        return backward(model(input_ids=ids, labels=ids).loss)

    found = compared(lambda: model_of(True, config=config_of(SHAPE, torch.float32)), step_of)
    assert found["reasons"] == {"GRAPH_CHECKPOINT"}


# --- several forwards and backwards ---


def forwards_before_a_backward(model, optimizer, step):
    first, second = loss_of(model, 2 * step), loss_of(model, 2 * step + 1)
    (first - 0.3 * second).backward()
    return [first.item(), second.item()]


def backwards_in_another_order(model, optimizer, step):
    return backward(loss_of(model, 2 * step), loss_of(model, 2 * step + 1))


def accumulated(model, optimizer, step):
    return backward(*(loss_of(model, 3 * step + each) for each in range(3) if not torch.manual_seed(each) or True))


def retained(model, optimizer, step):
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.item()]


def only_some_backwards(model, optimizer, step):
    unused = loss_of(model, step)
    return [unused.item(), *backward(loss_of(model, step + 100))]


def clipped(model, optimizer, step):
    losses = backward(loss_of(model, step))
    return [*losses, torch.nn.utils.clip_grad_norm_(trained(model), 0.1).item()]


def saved_on_the_host(model, optimizer, step):
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, step)
    return backward(loss)


def with_hooks_on_parameters(model, optimizer, step):
    seen: list[float] = []
    handles = [p.register_hook(lambda g: seen.append(g.float().norm().item())) for p in trained(model)]
    losses = backward(loss_of(model, step))
    for handle in handles:
        handle.remove()
    return [*losses, *sorted(seen)]


def of_varying_masks(model, optimizer, step):
    mask = torch.ones(2, LENGTH, dtype=torch.long, device=DEVICE)
    if step % 3:
        mask[0, -(10 + step) :] = 0
    return backward(loss_of(model, step, attention_mask=mask))


def of_own_positions(model, optimizer, step):
    positions = torch.arange(LENGTH, device=DEVICE).remainder(20 + step).expand(2, -1)
    return backward(loss_of(model, step, position_ids=positions))


def evaluated_between(model, optimizer, step):
    loss = loss_of(model, step)
    model.eval()
    with torch.no_grad():
        other = loss_of(model, step)
    model.train()
    return [*backward(loss), other.item()]


STEPS_OF = [
    forwards_before_a_backward, backwards_in_another_order, accumulated, retained, only_some_backwards, clipped,
    saved_on_the_host, with_hooks_on_parameters, of_varying_masks, of_own_positions, evaluated_between,
]  # fmt: skip


QUICK_STEPS = (
    forwards_before_a_backward, accumulated, retained, saved_on_the_host, of_varying_masks, evaluated_between
)  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize(("dropout", "step_of"), crossed((0.0, 0.1), STEPS_OF, only=QUICK_STEPS))
def test_steps(step_of, dropout):
    assert compared(lambda: model_of(lora_dropout=dropout), step_of, 9 if GPU else 5)["replays"]


def test_a_mask_written_without_its_version():
    """``dist.broadcast`` writes a mask without a new version. Address and version of the mask stay the same between two steps."""
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril()

    def step_of(model, optimizer, step):
        version = mask._version
        mask.data[..., 4:, 3] = step % 2 == 0
        assert mask._version == version
        return backward(loss_of(model, step, attention_mask=mask))

    assert compared(model_of, step_of)["replays"] == LAYERS * (STEPS - EAGER)


# --- changes of the model in the middle of a training ---


def changed(changes: dict[int, Callable[[Any], Any]], around: Callable[[Any], Any] | None = None) -> Step:
    """Run steps with changes of the model before some of them. A context surrounds the step CHANGE."""

    def step_of(model, optimizer, step):
        if step in changes:
            changes[step](model)
        with around(model) if around and step == CHANGE else contextlib.nullcontext():
            return backward(loss_of(model, step))

    return step_of


def scaling(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2


def projection(model):
    return layers_of(model)[1].mlp.up_proj.base_layer.weight


def written_weight(model):
    projection(model).data.add_(1)
    nf4_patch.release()


def freeze(model, frozen):
    for parameter in layers_of(model)[1].parameters():
        if parameter.dtype.is_floating_point and parameter.dim() == 2:
            parameter.requires_grad_(not frozen)


def second_adapter(model):
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model.add_adapter("other", config)
    model.set_adapter("other")


def more(function, *args, **kwargs):
    return function(*args, **kwargs) * 1.25


def forward_replaced(model):
    mlp = layers_of(model)[0].mlp
    mlp.forward = partial(more, mlp.forward)


def norm_replaced(model):
    layer = layers_of(model)[0]
    norm = type(layer.input_layernorm)(SHAPE.hidden_size).to(DEVICE, torch.bfloat16)
    norm.weight.requires_grad_(False).fill_(1.5)
    layer.input_layernorm = norm


def strides_changed(model):
    """Change the strides, with the same address and shape: every number is then the first one."""
    weight = layers_of(model)[0].input_layernorm.weight
    weight.data.copy_(torch.linspace(0.5, 1.5, len(weight)))
    weight.data = weight.data[:1].expand(len(weight))


def scales_moved(model):
    state = projection(model).quant_state
    state.absmax.data = state.absmax.roll(1)


def activation_replaced(model):
    layers_of(model)[0].mlp.act_fn = torch.nn.GELU()


class Doubled(torch.nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def dropout_replaced(model):
    """Replace a module in a ModuleDict, which changes no attribute."""
    layers_of(model)[0].mlp.up_proj.lora_dropout["default"] = Doubled()


def class_changed(model):
    act = layers_of(model)[0].mlp.act_fn
    act.__class__ = type("Changed", (type(act),), {"forward": lambda self, x: 2 * torch.nn.functional.silu(x)})


def scaled(module, arguments, output):
    return output * 1.5


class Replacement:
    """Replaces a function of a class or of a Python module, as Liger, Unsloth and SageAttention do."""

    def __init__(self, holder: Callable[[], Any], name: str, function: Callable[..., Any] = more):
        self.holder, self.name, self.function = holder, name, function

    def change(self, model: Any) -> None:
        before = self.before = getattr(self.holder(), self.name)
        setattr(self.holder(), self.name, lambda *args, **kwargs: self.function(before, *args, **kwargs))

    def undo(self, model: Any) -> None:
        setattr(self.holder(), self.name, self.before)


def modeling() -> Any:
    from transformers.models.llama import modeling_llama

    return modeling_llama


def turned(function, q, k, *args, **kwargs):
    q, k = function(q, k, *args, **kwargs)
    return q * 1.25, k


def attention_registered(model):
    registry = modeling().ALL_ATTENTION_FUNCTIONS
    attention = registry["sdpa"]

    def doubled(*args, **kwargs):
        output, weights = attention(*args, **kwargs)
        return output * 2, weights

    registry["sdpa"] = doubled


def attention_unregistered(model):
    del modeling().ALL_ATTENTION_FUNCTIONS["sdpa"]


def factors(model):
    layers_of(model)[0].mlp.act_fn = REMOTE.Factors(SHAPE.intermediate_size, DEVICE)


def configured(model):
    layers_of(model)[0].mlp.act_fn = REMOTE.Configured()


def of_config(change: Callable[[Any], Any]) -> dict[int, Callable[[Any], Any]]:
    return {0: configured, CHANGE: lambda m: change(layers_of(m)[0].mlp.act_fn.config)}


def of_factors(change: Callable[[Any], Any]) -> dict[int, Callable[[Any], Any]]:
    return {0: factors, CHANGE: lambda m: change(layers_of(m)[0].mlp.act_fn)}


def loaded_by_assignment(model):
    state = {name: value.clone() * 1.5 for name, value in model.state_dict().items() if "lora_" in name}
    model.load_state_dict(state, strict=False, assign=True)
    for parameter in trained(model):
        parameter.requires_grad_(True)


def norms_swapped(model):
    weight = layers_of(model)[0].input_layernorm.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach() * 1.5, requires_grad=False))


class Parametrization(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized(model):
    norm = layers_of(model)[0].input_layernorm
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Parametrization())


def several_adapters(model):
    model.base_model.set_adapter(["default", "other"])


def weighted_adapter(model):
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "weighted", combination_type="cat")
    model.base_model.set_adapter("weighted")


def dora(model):
    from peft import LoraConfig

    targets = ["up_proj", "q_proj"]
    model.add_adapter("other", LoraConfig(r=4, target_modules=targets, use_dora=True, task_type="CAUSAL_LM"))
    model.set_adapter("other")


def dtype_of_the_state(model):
    projection(model).quant_state.dtype = torch.float32


def inheriting(model):
    layers_of(model)[0].mlp.act_fn = INHERITING()


def own_class_changed(model):
    layer = layers_of(model)[1]
    kind = type(layer)

    def forward(self, *args, **kwargs):
        return kind.forward(self, *args, **kwargs) * 1.25

    layer.__class__ = type("Changed", (kind,), {"forward": forward})


class Method(Replacement):
    def undo(self, model: Any) -> None:
        delattr(self.holder(), self.name)


def rewritten(q, k, cos, sin, unsqueeze_dim=1):
    return 1.25 * q, k


class Code(Replacement):
    """Replaces the code inside a function, as IPython's autoreload does."""

    def change(self, model):
        function = getattr(self.holder(), self.name)
        self.before, function.__code__ = function.__code__, self.function.__code__

    def undo(self, model):
        getattr(self.holder(), self.name).__code__ = self.before


def doubled_call(self, *args, **kwargs):
    return 2 * torch.nn.Module.__call__(self, *args, **kwargs)


class Added(Replacement):
    """Adds a method to a class that inherits the method."""

    def change(self, model):
        setattr(self.holder(), self.name, self.function)

    def undo(self, model):
        delattr(self.holder(), self.name)


INHERITING = REMOTE.Inheriting
ROPE_CODE = Code(modeling, "apply_rotary_pos_emb", rewritten)
CALL = Added(lambda: modeling().LlamaMLP, "__call__", doubled_call)
CAST = Added(
    lambda: importlib.import_module("peft.tuners.lora.bnb").Linear4bit,
    "_cast_input_dtype",
    lambda self, x, dtype: 2 * x.to(dtype),
)
INHERITED = Method(lambda: INHERITING, "forward")
NORM = Replacement(lambda: modeling().LlamaRMSNorm, "forward")
ROPE = Replacement(modeling, "apply_rotary_pos_emb", turned)
SDPA = Replacement(lambda: torch.nn.functional, "scaled_dot_product_attention")
PRODUCT = Replacement(lambda: bitsandbytes, "matmul_4bit")
LORA = Replacement(lambda: importlib.import_module("peft.tuners.lora.bnb").Linear4bit, "forward")

# What is done to the model, by the step before which it is done.
CHANGES = {
    "scaling": {CHANGE: scaling},
    "moved data": {CHANGE: lambda m: [setattr(p, "data", p.data.clone() * 1.5) for p in trained(m)]},
    "moved weight": {CHANGE: lambda m: setattr(projection(m), "data", projection(m).data.roll(1, 0))},
    "written weight": {CHANGE: written_weight},
    "scales replaced": {
        CHANGE: lambda m: setattr(projection(m).quant_state, "absmax", projection(m).quant_state.absmax.roll(1))
    },
    "frozen": {CHANGE: lambda m: freeze(m, True), UNDO: lambda m: freeze(m, False)},
    "norm trained": {CHANGE: lambda m: layers_of(m)[0].input_layernorm.weight.requires_grad_(True)},
    "hooked": {CHANGE: lambda m: layers_of(m)[0].mlp.register_forward_hook(scaled)},
    "merged": {CHANGE: lambda m: m.merge_adapter(), CHANGE + 1: lambda m: m.unmerge_adapter()},
    "second adapter": {CHANGE: second_adapter, UNDO: lambda m: m.set_adapter("default")},
    "attention changed": {CHANGE: lambda m: m.set_attn_implementation("eager")},
    "forward replaced": {CHANGE: forward_replaced},
    "scales moved": {CHANGE: scales_moved},
    "strides changed": {CHANGE: strides_changed},
    "norm replaced": {CHANGE: norm_replaced},
    "activation replaced": {CHANGE: activation_replaced},
    "dropout replaced": {CHANGE: dropout_replaced},
    "class changed": {CHANGE: class_changed},
    "class of the layer changed": {CHANGE: own_class_changed},
    "method of a norm": {CHANGE: NORM.change, UNDO: NORM.undo},
    "method that was inherited": {0: inheriting, CHANGE: INHERITED.change, UNDO: INHERITED.undo},
    "method of an adapter": {CHANGE: LORA.change, UNDO: LORA.undo},
    "function of another Python module": {CHANGE: PRODUCT.change, UNDO: PRODUCT.undo},
    "rotary embeddings": {CHANGE: ROPE.change, UNDO: ROPE.undo},
    "code of a function": {CHANGE: ROPE_CODE.change, UNDO: ROPE_CODE.undo},
    "call of a module": {CHANGE: CALL.change, UNDO: CALL.undo},
    "inherited method of an adapter": {CHANGE: CAST.change, UNDO: CAST.undo},
    "attention of PyTorch": {CHANGE: SDPA.change, UNDO: SDPA.undo},
    "attention registered": {CHANGE: attention_registered, UNDO: attention_unregistered},
    "item of a list": of_factors(lambda act: act.lists["default"].__setitem__(0, 2.0)),
    "moved attribute": of_factors(lambda act: setattr(act.tensor, "data", act.tensor * 2)),
    "moved tensor in a dict": of_factors(lambda act: setattr(act.tensors["default"], "data", act.tensor * 2)),
    "written attribute": of_factors(lambda act: act.tensor.mul_(2)),
    "number on the host": of_factors(lambda act: act.number.fill_(2)),
    "dict of a config": of_config(lambda config: config.factors.update(default=2.0)),
    "other name in a config": of_config(lambda config: setattr(config, "hidden_size", 2)),
    "loaded by assignment": {CHANGE: loaded_by_assignment},
    "swapped tensors": {CHANGE: norms_swapped},
    "parametrized": {CHANGE: parametrized},
    "adapter deleted": {0: second_adapter, CHANGE: lambda m: (m.set_adapter("default"), m.delete_adapter("other"))},
    "several adapters": {0: second_adapter, CHANGE: several_adapters},
    "weighted adapter": {0: second_adapter, CHANGE: weighted_adapter},
    "dora": {CHANGE: dora, UNDO: lambda m: m.set_adapter("default")},
    "dtype of a state": {CHANGE: dtype_of_the_state},
    "evaluated in part": {CHANGE: lambda m: layers_of(m)[0].mlp.eval(), UNDO: lambda m: m.train()},
    "released": {CHANGE: lambda m: nf4_patch.release()},
}
BACKENDS = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def fewer_multiprocessors():
    torch._C._set_sm_carveout_experimental(16)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


# What is around one step.
AROUND = {
    "hooked for a step": lambda m: layers_of(m)[0].register_forward_pre_hook(lambda _, x: (x[0] * 1.5, *x[1:])),
    "disabled adapter": lambda m: m.disable_adapter(),
    "order of backends": lambda m: torch.nn.attention.sdpa_kernel(BACKENDS, set_priority=True),
    "default dtype": lambda m: default_dtype(),
    "fewer multiprocessors": lambda m: fewer_multiprocessors(),
    "precision": lambda m: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


# Changes that a graph reads, or for which there is a graph of its own.
NOT_REFUSED = {
    "written weight", "released", "attention changed", "precision", "order of backends", "default dtype", "written attribute",
    "fewer multiprocessors",
}  # fmt: skip


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in NOT_REFUSED])
def test_a_fingerprint_notices(change):
    model = model_of()
    changes = CHANGES[change]
    changes.get(0, REMOTE.never)(model)
    fingerprints = [Fingerprint(layer) for layer in layers_of(model)]
    assert all(each.holds() and each.is_in_place() for each in fingerprints)
    changes[CHANGE](model)
    try:
        assert not all(each.holds() and each.is_in_place() for each in fingerprints)
    finally:
        if UNDO in changes:
            changes[UNDO](model)


# Changes after which a training goes on in another way, in each run. The full run trains with all of them.
TRAINED = {*NOT_REFUSED, *AROUND, "frozen", "hooked", "merged"}
WAYS = [
    pytest.param(*each.values, marks=each.marks if each.values[1] in TRAINED else pytest.mark.full)
    for each in crossed(("plain", "cached"), [*CHANGES, *AROUND])
]


@pytest.mark.every(13)
@pytest.mark.parametrize(("base", "change"), WAYS)
def test_changes(change, base, frozen):
    step_of = changed(CHANGES.get(change, {}), AROUND.get(change))
    found = compared(model_of, step_of, LAST, BASES[base])
    assert ("GRAPH_CHANGED" in found["reasons"]) == (change not in NOT_REFUSED)


@pytest.mark.full
def test_changed_dropout():
    def more(model):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5

    compared(lambda: model_of(lora_dropout=0.1), changed({CHANGE: more}), LAST)


@pytest.mark.full
def test_changes_between_forward_and_backward():
    """If the graphs are gone when the backward comes, the layer recomputes eagerly with the forward's random numbers."""

    def step_of(model, optimizer, step):
        loss = loss_of(model, step)
        if step in (CHANGE, CHANGE + 1):
            nf4_patch.release()
        return backward(loss)

    for dropout in (0.0, 0.1):
        assert compared(lambda d=dropout: model_of(lora_dropout=d), step_of, LAST)["replays"]


def scaled_twice(model):
    scaling(model)
    return lambda: [m.scaling.update(default=m.scaling["default"] / 2) for m in model.modules() if is_scaled(m)]


def is_scaled(module):
    return isinstance(getattr(module, "scaling", None), dict)


def activation_for_a_while(model):
    mlp = layers_of(model)[0].mlp
    before, mlp.act_fn = mlp.act_fn, torch.nn.GELU()
    return lambda: setattr(mlp, "act_fn", before)


def evaluated_for_a_while(model):
    model.eval()
    return model.train


def hooked_for_a_while(model):
    return layers_of(model)[0].mlp.register_forward_hook(scaled).remove


def turned_for_a_while(model):
    ROPE.change(model)
    return lambda: ROPE.undo(model)


CHANGES_FOR_A_WHILE = [
    scaled_twice, activation_for_a_while, evaluated_for_a_while, hooked_for_a_while, turned_for_a_while
]  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("change", thinned(CHANGES_FOR_A_WHILE, 2))
def test_changes_that_the_recompute_sees(change, frozen):
    """A reentrant checkpoint recomputes with the changed layer, and so do layers with graphs."""

    def step_of(model, optimizer, step):
        loss = loss_of(model, step)
        undo = change(model) if step in (CHANGE, UNDO) else lambda: None
        try:
            return backward(loss)
        finally:
            undo()

    found = compared(lambda: model_of(True, lora_dropout=0.1), step_of, LAST)
    assert found["replays"] == LAYERS * (LAST - EAGER) and found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_BACKWARD"}


@pytest.mark.full
@pytest.mark.parametrize("change", thinned(CHANGES_FOR_A_WHILE, 2))
def test_changes_that_the_recompute_does_not_see(change, frozen):
    """With a non-reentrant checkpoint, the gradients are those of the forward, as if the change came after the backward."""

    def step_of(early):
        def step_of(model, optimizer, step):
            loss = loss_of(model, step)
            undo = change(model) if early and step in (CHANGE, UNDO) else lambda: None
            try:
                return backward(loss)
            finally:
                undo()

        return step_of

    eager = run(model_of(lora_dropout=0.1), step_of(False), LAST)
    torch.manual_seed(0)
    graphed = run(model_of(lora_dropout=0.1), step_of(True), LAST, graphs="auto")
    assert_same(eager, graphed)
    assert graphed["replays"] == LAYERS * (LAST - EAGER) and graphed["reasons"] == {"GRAPH_NEW_SHAPE"}


@pytest.mark.full
def test_modes_and_transforms_around_the_backward():
    """Modes and transforms see every operation of the recompute."""
    from torch.testing._internal.two_tensor import TwoTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    def with_a_mode(model, optimizer, step):
        loss = loss_of(model, step)
        with Counting():
            return backward(loss)

    def of_a_batch(model, optimizer, step):
        with torch.autocast(DEVICE, torch.bfloat16):
            losses = model(input_ids=tokens(step)).logits.float().logsumexp(-1).mean(1)
        directions = torch.eye(2, device=DEVICE)
        found = torch.autograd.grad(losses, trained(model)[:3], directions, is_grads_batched=True)
        return [g.float().norm().item() for g in found]

    def of_a_subclass(model, optimizer, step):
        with torch.autocast(DEVICE, torch.bfloat16):
            losses = model(input_ids=tokens(step)).logits.float().logsumexp(-1).mean(1)
        found = torch.autograd.grad(losses, trained(model)[:3], TwoTensor(torch.ones_like(losses), -losses.detach()))
        return [part.float().norm().item() for g in found for part in (g.a, g.b)]

    for step_of in (with_a_mode, of_a_batch, of_a_subclass):
        found = compared(model_of, step_of)
        assert found["replays"] == LAYERS * (STEPS - EAGER) and found["reasons"] == {
            "GRAPH_NEW_SHAPE",
            "GRAPH_BACKWARD",
        }


@pytest.mark.full
@pytest.mark.parametrize("inner", [False, True])
def test_layers_inside_another_checkpoint(inner):
    def step_of(model, optimizer, step):
        def loss_from(x):
            with torch.autocast(DEVICE, torch.bfloat16):
                return model(inputs_embeds=x, labels=tokens(step)).loss

        x = model.get_input_embeddings()(tokens(step)).detach().requires_grad_()
        return backward(torch.utils.checkpoint.checkpoint(loss_from, x, use_reentrant=False))

    found = compared(lambda: model_of(inner, lora_dropout=0.1), step_of)
    assert not found["replays"] and found["reasons"] == {"GRAPH_MODE"}


def test_attributes_of_parameters():
    """An eager recompute reads an alias of each parameter. The alias has the parameter's attributes."""

    def make():
        model = model_of()
        layers_of(model)[0].mlp.act_fn = REMOTE.Scaled(SHAPE.intermediate_size, DEVICE)
        return model

    def step_of(model, optimizer, step):
        loss = loss_of(model, step)
        if step == CHANGE:
            nf4_patch.release()
        return backward(loss)

    assert compared(make, step_of)["replays"]


def test_gradients_are_aligned():
    """Gradients are aligned as those of an eager backward.

    Otherwise, norms of several gradients would be added up in another order.
    """
    parts = [torch.full((size,), float(size)) for size in (3, 6, 8, 1)]
    flat = torch.cat(aligned(parts))
    found = torch._C._nn.unflatten_dense_tensors(flat, aligned([torch.empty_like(p, device="meta") for p in parts]))[
        ::2
    ]
    assert all(map(torch.equal, found, parts))
    assert all((each.data_ptr() - flat.data_ptr()) % 16 == 0 for each in found)


@pytest.mark.full
def test_second_derivatives():
    def step_of(model, optimizer, step):
        loss = loss_of(model, step)
        gradients = torch.autograd.grad(loss, trained(model), create_graph=True)
        penalty = sum(g.float().square().sum() for g in gradients)
        (loss + 0.1 * penalty).backward()
        return [loss.item(), float(penalty)]

    config = config_of(SHAPE, torch.bfloat16)
    config._attn_implementation = "eager"
    eager, graphed = run(model_of(config=config), step_of), run(model_of(config=config), step_of, graphs="auto")
    assert graphed["replays"] and graphed["losses"] == pytest.approx(
        eager["losses"], rel=2**-7
    )  # sums in another order


@pytest.mark.full
def test_modes_around_the_forward_alone():
    """The recompute of an eager backward runs in the modes of the backward."""

    def step_of(model, optimizer, step):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = loss_of(model, step)
        return backward(loss)

    assert compared(lambda: model_of(reentrant=True), step_of)["replays"]


@pytest.mark.full
def test_layers_that_are_used_twice():
    """Use layers twice in one model, and in two models at once."""

    def make():
        model = model_of(lora_dropout=0.05)
        layers_of(model)[-1] = layers_of(model)[0]
        return model

    def step_of(model, optimizer, step):
        return backward(loss_of(model, step), loss_of(model.other, step))

    def two():
        model, other = make(), make()
        layers_of(other)[1] = layers_of(model)[1]
        object.__setattr__(model, "other", other)
        return model

    assert compared(make)["replays"]
    assert compared(two, step_of)["replays"]


@pytest.mark.full
def test_copies_of_a_model_with_graphs():
    def step_of(model, optimizer, step):
        if step == CHANGE:
            object.__setattr__(model, "other", copy.deepcopy(model))
        other = backward(loss_of(model.other, step)) if step >= CHANGE else []
        return [*backward(loss_of(model, step)), *other]

    assert compared(model_of, step_of, LAST)["replays"]


@pytest.mark.full
def test_gradients_of_a_part():
    def step_of(model, optimizer, step):
        loss = loss_of(model, step)
        part = trained(model)[:5]
        found = torch.autograd.grad(loss, part, retain_graph=True)
        return [*[g.float().norm().item() for g in found], *backward(loss)]

    assert compared(lambda: model_of(lora_dropout=0.05), step_of)["replays"]


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_interrupts_in_a_replay(where, monkeypatch):
    """An interrupt in a backward leaves the random generator as it was, and the next step has the results of an eager run."""
    replays = (torch.cuda.CUDAGraph, "replay") if GPU else (recorders.Repetition, "again")
    random_state = torch.cuda.get_rng_state if GPU else torch.get_rng_state

    def step_of(model, optimizer, step):
        if step == CHANGE and graphs.replays:
            loss = loss_of(model, step) if where == "backward" else None
            before = random_state()
            with monkeypatch.context() as patch:
                patch.setattr(*replays, lambda *arguments: interrupt(None, arguments))
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, step) if loss is None else loss.backward()
            assert torch.equal(random_state(), before)
            optimizer.zero_grad(set_to_none=True)
        if step == CHANGE:
            torch.manual_seed(7)
        return one_step(model, optimizer, step)

    nf4_patch.disable()
    monkeypatch.setattr(graphs, "replays", 0)
    found = compared(lambda: model_of(lora_dropout=0.05), step_of, LAST)
    assert found["replays"] == LAYERS * (LAST - EAGER + (where == "backward"))


def test_interrupts_leave_no_alias_in_the_model():
    """Interrupt ``swapped`` in the loop over the parameters, when a line runs for the second time."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    held = dict(enumerate(parameters))
    places = [(held, key, parameter) for key, parameter in enumerate(parameters)]
    code, interrupted = capture.swapped.__wrapped__.__code__, 0
    for line in lines_of(code):
        reached: list[int] = []

        def interrupt(reached=reached):
            if len(reached) == 2:
                raise KeyboardInterrupt

        aliases = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
        suppressed = contextlib.suppress(KeyboardInterrupt)
        with suppressed, at_line(code, line, interrupt, reached), capture.swapped(places, aliases):
            pass
        interrupted += len(reached) > 1
        assert all(held[key] is parameter for key, parameter in enumerate(parameters)), line
    assert interrupted >= 4


def test_an_argument_that_is_written_is_copied_again():
    mask = torch.zeros(4, device=DEVICE)
    slot = Slot(mask)
    for number in range(3):
        mask.fill_(number)
        slot.load(mask)
        assert torch.equal(slot.buffer, mask)


def test_interrupt_after_an_argument_was_copied():
    """The next call copies its own argument, although the slot held this argument before."""
    mask, other = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    slot = Slot(mask)
    slot.load(mask)
    buffer = slot.base

    class Interrupted:
        def copy_(self, tensor: Tensor) -> None:
            buffer.copy_(tensor)
            raise KeyboardInterrupt

    slot.base = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        slot.load(other)
    slot.base = buffer
    slot.load(mask)
    assert torch.equal(slot.buffer, mask)


@pytest.mark.full
def test_graphs_dropped_by_another_thread(monkeypatch):
    """Another thread calls ``release()`` between the check and the replay."""
    replay, calls = graphs_module.replay, []

    def late(*arguments):
        calls.append(len(calls))
        if len(calls) % 4 == 0:
            thread = threading.Thread(target=nf4_patch.release)
            thread.start()
            thread.join()
        return replay(*arguments)

    monkeypatch.setattr(graphs_module, "replay", late)
    assert compared(lambda: model_of(lora_dropout=0.05), steps=16 if GPU else 6)["replays"] and len(calls) >= 8


# --- shapes, streams, threads ---


def step_of_lengths(length_of):
    return lambda model, optimizer, step: backward(loss_of(model, step, length=length_of(step)))


@pytest.mark.full
def test_varying_lengths():
    steps = 25 if GPU else 10
    found = compared(model_of, step_of_lengths(lambda step: (32, 48, 64, 32, 32)[step % 5]), steps)
    assert 0 < found["replays"] < LAYERS * steps
    assert found["status"].graphs.shapes == 3


@pytest.mark.full
def test_the_first_shapes_stay(monkeypatch):
    monkeypatch.setattr(shapes_module, "SHAPES", 2)
    each = EAGER + 2
    found = compared(model_of, step_of_lengths(lambda step: 16 * (4 - step // each)), 4 * each)
    assert found["status"].graphs.shapes == 2
    assert found["replays"] == LAYERS * (2 + 2)  # of four lengths, each eager at first and then twice


def test_a_recording_that_no_longer_holds_is_dropped():
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    found = graphs.recordings["key"] = shapes_module.ByLayer()
    found[layer] = found[other] = None
    graphs.drop_changed("key", layer)
    graphs.drop_changed("another key", other)
    assert list(found) == [other]
    del graphs.recordings["key"]


def test_graphs_of_a_freed_model_or_static_cache_make_room(monkeypatch):
    """A new shape frees these graphs, and gets graphs itself."""
    monkeypatch.setattr(shapes_module, "SHAPES", 1)
    monkeypatch.setattr(graphs, "recordings", {})
    layer, owner = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    freed = []
    lock = SimpleNamespace(lock=threading.Lock())
    graph = SimpleNamespace(recorder=lock, reset=lambda: freed.append(1), replays=1)
    generates = ("generates", weakref.ref(owner))  # the static cache
    for key in (("trains", None), generates):
        graphs.recordings[key] = shapes_module.ByLayer({layer: graph})
        assert not graphs.has_room(("another", key[-1]), layer)
    del owner
    another = ("another", weakref.ref(graphs))
    assert graphs.has_room(another, layer) and generates not in graphs.recordings and freed == [1]
    del layer
    assert graphs.has_room(("another", None), torch.nn.Linear(1, 1)) and not graphs.recordings


def test_the_fingerprint_of_any_recording_that_holds(monkeypatch):
    """A layer that also generates has recordings in evaluation, which do not match it in training."""
    layer = layers_of(model_of())[0].eval()
    of_generation = Fingerprint(layer)
    of_training = Fingerprint(layer.train())
    monkeypatch.setattr(graphs, "recordings", {})
    for key, fingerprint in enumerate((of_generation, of_training)):
        assert graphs.fingerprint_of(layer) is None
        graphs.recordings[key] = shapes_module.ByLayer({layer: SimpleNamespace(fingerprint=fingerprint)})
    assert graphs.fingerprint_of(layer) is of_training and graphs.fingerprint_of(layer.eval()) is of_generation
    layer.new = 1
    assert graphs.fingerprint_of(layer) is None


def test_recordings_that_share_a_fingerprint_are_compared_once(monkeypatch):
    model, compared = model_of(), []
    layer = layers_of(model)[0]
    found = SimpleNamespace(fingerprint=Fingerprint(layer))
    monkeypatch.setattr(graphs, "recordings", {key: shapes_module.ByLayer({layer: found}) for key in range(3)})
    monkeypatch.setattr(Fingerprint, "is_outdated", compared.append)
    graphs.drop_outdated(model)
    assert compared == [found.fingerprint]


def test_when_a_shape_is_recorded(at_the_third_call):
    """A shape is recorded at its third call.

    If a change dropped the recording, it is recorded again after twice as many calls each time.
    """
    assert [calls for calls in range(1, 100) if shapes_module.is_due(calls)] == [3, 6, 12, 24, 48, 96]
    assert FIRST_CALLS == shapes_module.RECORDED_AT - 1
    assert compared(model_of)["replays"] == LAYERS * (STEPS - 2)


def test_a_call_of_a_shape_without_graphs_searches_for_no_shared_parameters(monkeypatch):
    """Such calls are frequent if lengths vary. Only a layer's first call searches, and calls that record."""
    searched = []

    def search(layer):
        searched.append(step)
        return capture.trained_places(layer)

    monkeypatch.setattr(shapes_module, "trained_places", search)
    record_at(2, monkeypatch)
    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        for step, length in enumerate([8, 16, 24, 8, 24, 32]):
            loss_of(model, step, length).backward()
    assert {*searched} == {0, 3, 4}


def shapes_after(lengths, activations, monkeypatch):
    """Train with these lengths, and record layers at the second call.

    Return the number of recorded shapes after each step, and the number of replays per layer.
    """
    record_at(2, monkeypatch)
    found = []

    def step_of(model, optimizer, step):
        loss = backward(loss_of(model, step, lengths[step]))
        found.append(nf4_patch.status().graphs.shapes)
        return loss

    graphed = compared(model_of, step_of, len(lengths), activations=activations)
    return found[len(lengths) :], graphed["replays"] // LAYERS


@pytest.mark.parametrize("activations", ["off", "64GiB"])
def test_replays_pay_for_further_shapes(activations, monkeypatch):
    """The first shape is recorded at once, and each further one after three replays, or after three eager calls of its own.

    A shape is due at its second and fourth call.
    """
    monkeypatch.setattr(shapes_module, "CREDIT", 1)
    monkeypatch.setattr(shapes_module, "PRICE", 3)
    lengths = 24, 24, 16, 16, 24, 24, 8, 8, 16, 16
    assert shapes_after(lengths, activations, monkeypatch) == ([0, 1, 1, 1, 1, 1, 1, 2, 2, 3], 3 + 1 + 1)


@pytest.mark.parametrize("activations", ["off", "64GiB"])
def test_a_frequent_shape_replaces_the_least_used_one(activations, monkeypatch):
    """The first shape is used three times, the second five times. At its eighth call, the third shape replaces the first."""
    monkeypatch.setattr(shapes_module, "SHAPES", 2)
    lengths = 24, 24, 16, 16, 16, 16, 8, 8, 8, 8, 8, 8, 8, 8, 24, 16, 8
    found = [0, 1, 1, *[2] * 14], 1 + 4 + 2
    assert shapes_after(lengths, activations, monkeypatch) == found


@pytest.mark.full
def test_a_larger_batch_gets_the_memory_of_the_graphs(monkeypatch):
    """There is memory for 100 tokens. A batch takes as much as it has tokens, and graphs take as much as 30 tokens.

    No step runs out of memory.
    """

    class Small(recorder_module.Recorder if GPU else recorders.Rerun):
        def __init__(self, device):
            super().__init__(device)
            alive.append(weakref.ref(self))

    def step_of(model, optimizer, step):
        length = 100 if step == EAGER + 2 else 16
        loss = loss_of(model, step, length)
        held = 30 if graphs.recordings else 0
        assert length + held <= 100, "out of memory only with graphs"
        return backward(loss)

    alive = list[Any]()
    monkeypatch.setattr(recording_module, "Recorder", Small)
    graphs.largest.clear()
    found = compared(model_of, step_of, EAGER + 5)
    assert len(alive) == 2 and found["replays"] == LAYERS * (2 + 2)


@pytest.mark.full
def test_an_auxiliary_loss_outside_of_the_layer(monkeypatch):
    # a list of its own, because ``gc.freeze`` hides older ones
    monkeypatch.setattr(REMOTE, "ROUTED", [])

    def make():
        model = model_of()
        layers_of(model)[1].mlp = REMOTE.Router(layers_of(model)[1].mlp)
        return model

    def step_of(model, optimizer, step):
        REMOTE.ROUTED.clear()
        loss = loss_of(model, step)
        assert len(REMOTE.ROUTED) == 1
        return backward(loss + 0.1 * sum(REMOTE.ROUTED))

    found = compared(make, step_of)
    assert found["replays"] == (LAYERS - 1) * (STEPS - EAGER) and "GRAPH_STATE" in found["reasons"]


@pytest.mark.every(6)
@pytest.mark.parametrize("activations", ["off", "64GiB"])
@pytest.mark.parametrize(("kind", "reentrant"), [("lists", False), ("lists", True), ("keeps", False)])
def test_memory_that_stays_after_a_forward_or_backward(kind, reentrant, activations, monkeypatch):
    """Try a function that keeps a tensor on ctx without saving it, and a function that appends to a list in its backward."""
    if kind == "keeps" and activations != "off":
        pytest.skip("kept layers keep it too")
    monkeypatch.setattr(REMOTE, "GRADIENTS", [])

    def make():
        model = model_of(reentrant)
        layers_of(model)[1].mlp = REMOTE.Altered(layers_of(model)[1].mlp, kind)
        return model

    def step_of(model, optimizer, step):
        REMOTE.GRADIENTS.clear()
        losses = backward(loss_of(model, step))
        assert step == EAGER or len(REMOTE.GRADIENTS) == (kind == "lists")  # layers are recorded in the step EAGER
        return losses

    if not GPU:
        monkeypatch.setattr(recording_module, "Recorder", recorders.Counting)
    found = compared(make, step_of, activations=activations)
    assert found["replays"] == (LAYERS - 1) * (STEPS - EAGER) and "GRAPH_STATE" in found["reasons"]


def test_a_refused_layer_keeps_nothing_alive(monkeypatch, frozen):
    def refuse(recorder, task):
        raise recorder_module.Refusal(Reason.GRAPH_FAILED, "no")

    monkeypatch.setattr(recording_module, "GraphedLayer", refuse)
    model = model_of()
    run(model, one_step, graphs="auto")
    with nf4_patch.enabled(graphs="auto"):
        for step in range(RECORDED_AT + 1):
            loss_of(model, step)
        assert graphs.refusals
        layer = weakref.ref(layers_of(model)[0])
        del model
        gc.collect()
        assert layer() is None


def test_a_layer_that_holds_its_own_forward_is_freed(frozen):
    model = model_of()
    for layer in layers_of(model):
        layer.forward = layer.forward  # a bound method in the layer's __dict__
    with nf4_patch.enabled(graphs="auto"):
        before = graphs.replays
        for step in range(EAGER + 2):
            loss_of(model, step).backward()
        assert graphs.replays == before + 2 * LAYERS
        reference = weakref.ref(layers_of(model)[0])
        del model, layer
        gc.collect()
        assert reference() is None


def test_an_error_in_a_capture_stops_no_training(monkeypatch):
    failed = []

    def fail(recorder, task):
        failed.append(task.layer)
        raise LookupError("a bug")

    monkeypatch.setattr(recording_module, "GraphedLayer", fail)
    found = compared(model_of)
    assert len(failed) == LAYERS and not found["replays"] and "INTERNAL_ERROR" in found["reasons"]


def test_refusals_outlive_the_graphs(monkeypatch):
    """If captures fail, all graphs are dropped, but each layer fails only once."""
    failed = []

    class Failing(recording_module.GraphedLayer):
        def __init__(self, recorder, task):
            if task.layer.self_attn.layer_idx != 1:
                failed.append(task.layer)
                recorder.broken = True
                raise recorder_module.Refusal(Reason.GRAPH_FAILED, "no")
            super().__init__(recorder, task)

    monkeypatch.setattr(recording_module, "GraphedLayer", Failing)
    found = compared(model_of)
    assert len(failed) == LAYERS - 1 and found["replays"] == STEPS - EAGER


@pytest.fixture
def uncollected():
    """Collect no garbage, so that only objects without references are freed, as in a step on a GPU, which makes few objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def holders_of(references: Any) -> list[Any]:
    """Return the objects that refer to each object that is still alive."""
    alive = [each() for each in references if each() is not None]
    return [[type(holder) for holder in gc.get_referrers(each) if holder is not alive] for each in alive]


@pytest.mark.full
@pytest.mark.parametrize("activations", ["off", "64GiB"])
def test_a_kept_loss_keeps_nothing_alive(activations, frozen, uncollected):
    """After its backward, a loss that the script keeps holds neither a weight nor an input of a layer."""
    model = model_of()
    with nf4_patch.enabled(graphs="auto", activations=activations):
        calls, kept = [], []
        for step in range(EAGER + 3):
            loss = loss_of(model, step)
            node, nodes = loss.grad_fn, []
            while node is not None:
                nodes += [node] if hasattr(node, "call") else []
                node = next((n for n, _ in node.next_functions if n is not None), None)
            calls += [weakref.ref(n.call) for n in nodes]
            del node, nodes
            loss.backward()
            if step >= EAGER:  # a loss of an eager step keeps its checkpoints
                kept.append(loss)
        assert len(calls) == 3 * LAYERS and not holders_of(calls)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            kept[-1].backward()
        weight = weakref.ref(layers_of(model)[0].mlp.up_proj.base_layer.weight)
        del model
        gc.collect()
        graphs.forget()
        gc.collect()
        assert not holders_of([weight])


@pytest.mark.every(4)
@pytest.mark.parametrize("activations", ["off", "64GiB"])
@pytest.mark.parametrize("goes_backward", [True, False])
def test_graphs_are_freed_with_their_layer(activations, goes_backward, frozen, uncollected):
    model = model_of()
    with nf4_patch.enabled(graphs="auto", activations=activations):
        for step in range(EAGER + 2):
            loss = loss_of(model, step)
            if step <= EAGER or goes_backward:
                loss.backward()
        last, recordings = layers_of(model)[-1], graphs.recordings if activations == "off" else graphs.kept
        held = [last, last.input_layernorm, *[found[last] for found in recordings.values()]]
        references = [*map(weakref.ref, held)]
        assert len(references) == 3
        del layers_of(model)[-1], last, held, loss
        assert not holders_of(references)


@pytest.mark.full
def test_a_decode_step_without_memory_leaves_the_graphs_of_the_training(monkeypatch):
    def refuse(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(recording_module, "GraphedForward", refuse)
    monkeypatch.setattr(steps_module, "GraphedStep", refuse)
    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        before = graphs.replays
        rollouts(model, cache_implementation="static", do_sample=False)
        assert graphs.replays - before == LAYERS * (ROLLOUTS - EAGER)


@pytest.mark.full
def test_another_thread_that_may_use_the_gpu():
    """A thread might use the GPU if, for example, it runs a function of the script."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait())
    thread.start()
    try:
        found = compared(model_of)
    finally:
        stop.set()
        thread.join()
    assert not found["replays"] and "GRAPH_THREADS" in found["reasons"]


@pytest.mark.full
def test_threads_of_libraries_that_use_no_gpu():
    """With the threads of a DataLoader or of a timer, layers are captured."""
    timer = threading.Timer(60, print)
    timer.start()
    try:
        assert compared(model_of)["replays"] == LAYERS * (STEPS - EAGER)
    finally:
        timer.cancel()


@pytest.mark.full
def test_numbers_that_another_thread_draws():
    """The capture of a layer that draws no random numbers does not restore a generator."""
    random.seed(0)
    model, drawn, stop = model_of(), [], threading.Event()

    def draw():
        while not stop.wait(1e-4):  # without the pause, this thread would take the GIL at each operator of the training
            drawn.append(random.random())

    draw_only = threading.Thread(target=draw)
    draw_only.start()
    try:
        run(model, one_step, graphs="auto")
    finally:
        stop.set()
        draw_only.join()
    assert len(drawn) == len(set(drawn))


@pytest.mark.gpu
def test_another_stream():
    stream = torch.cuda.Stream()

    def step_of(model, optimizer, step):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream) if step == 4 else contextlib.nullcontext():
            losses = backward(loss_of(model, step))
        torch.cuda.synchronize()
        return losses

    assert "GRAPH_MODE" in compared(model_of, step_of)["reasons"]


@pytest.mark.gpu
def test_two_threads():
    """Two models train on one stream at the same time."""
    torch.manual_seed(0)
    make = [model_of(), model_of()]
    alone = [run(model, one_step) for model in make]
    results: list[Any] = [None, None]

    def train(index: int) -> None:
        model, optimizer = make[index], optimizer_of(make[index], lr=1e-3)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            losses += one_step(model, optimizer, step)
            optimizer.step()
        results[index] = losses

    with nf4_patch.enabled(graphs="auto"):
        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [found["losses"] for found in alone]


# --- what cannot be captured, and what goes wrong ---


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, numpy.random.randn, lambda: torch.rand(()).item()])
def test_random_numbers_of_the_host(draw):
    """A capture notices if the layer draws random numbers on the host, and restores the generator."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    draw()
    before = warmup.HostGenerators()
    assert not before.moved()
    inside = [draw(), draw()]
    assert before.moved()
    before.restore()
    assert [draw(), draw()] == inside and before.moved()


def test_random_numbers_of_another_thread(monkeypatch):
    """Numbers that another thread draws during a warm-up are not drawn again, even if the warm-up cannot tell which
    thread drew them.
    """
    monkeypatch.setattr(recording_module, "others_may_use_gpu", lambda: "")
    numbers, ends, asked, others_draw = [], threading.Event(), [], warmup.others_draw

    def draw() -> None:
        while not ends.wait(1e-4):
            numbers.append(random.random())

    def asking(seconds: float) -> bool:
        asked.append(others_draw(max(seconds, 0.05)))
        return asked[-1]

    monkeypatch.setattr(warmup, "others_draw", asking)
    model, thread = model_of(), threading.Thread(target=draw)
    thread.start()
    try:
        found = run(model, one_step, graphs="auto")
    finally:
        ends.set()
        thread.join()
    assert len({*numbers}) == len(numbers) > 100
    assert asked and all(asked) and "GRAPH_THREADS" in found["reasons"]


def test_a_warm_up_draws_no_random_numbers_of_the_host():
    """A layer that draws such numbers is refused, and continues with the numbers that it draws without graphs."""
    states = []
    for options in ({}, {"graphs": "auto"}):
        model = model_of()
        layers_of(model)[1].mlp = REMOTE.Altered(layers_of(model)[1].mlp, "random")
        random.seed(0)
        found = run(model, lambda model, optimizer, step: [loss_of(model, step).item()], EAGER + 1, **options)
        states.append(random.getstate())
    assert states[0] == states[1] and "GRAPH_FAILED" in found["reasons"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("synchronizes", "GRAPH_FAILED"), ("waits", "GRAPH_FAILED"),
        ("random", "GRAPH_FAILED"), ("counts", "GRAPH_STATE"), ("keeps", "GRAPH_STATE"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_captured(kind, reason):
    def make():
        random.seed(0)
        model = model_of()
        if kind == "counts":  # a recompute counts too: only a reentrant checkpoint takes that
            model = model_of(reentrant=True)
        layers_of(model)[1].mlp = REMOTE.Altered(layers_of(model)[1].mlp, kind)
        return model

    if kind == "random":  # the recompute of a checkpoint draws another number
        random.seed(0)
        model = make()
        with nf4_patch.enabled(graphs="auto"):
            for step in range(4):
                before = random.getstate()
                loss_of(model, step)
                random.setstate(before)
                random.random()
        assert ("GRAPH_FAILED") in {r.name for (target, r) in counters.fallbacks if target == TARGET}
        return
    found = compared(make)
    assert reason in found["reasons"], found["status"].errors
    assert (
        found["replays"] == (LAYERS - 1) * (STEPS - EAGER) or kind == "waits"
    )  # a capture that failed drops all graphs


@pytest.mark.gpu
def test_no_memory_for_a_capture():
    def step_of(model, optimizer, step):
        if step == 2:
            torch.cuda.empty_cache()
            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
        try:
            return backward(loss_of(model, step))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    model = model_of()
    try:
        found = run(model, step_of, graphs="auto")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("the step itself had no memory")
    assert "GRAPH_MEMORY" in found["reasons"]
    eager = run(model_of(), one_step)
    assert found["losses"] == eager["losses"]


GIB = 2**30


@pytest.mark.parametrize(("peak", "fits"), [(17, True), (18, False)])
def test_memory_for_the_rest_of_a_step(peak, fits, monkeypatch):
    """Of 32 GiB, other processes use 8, graphs take 5, and one stays free. So 18 GiB are left for the peak of a step."""
    recorder = recorder_module.Recorder.__new__(recorder_module.Recorder)
    recorder.device, recorder.taken = 0, 1 * GIB
    found = iter([peak * GIB, 10 * GIB, 14 * GIB, peak * GIB + 2**20])
    monkeypatch.setattr(recorder_module, "memory", lambda *kind: next(found))
    monkeypatch.setattr(MemoryInfo, "of", lambda device: MemoryInfo(10 * GIB, 14 * GIB, 8 * GIB, GIB))
    expected = (
        contextlib.nullcontext() if fits else pytest.raises(torch.cuda.OutOfMemoryError, match=r"18\.00 GiB, of 23")
    )
    with expected, recorder.leaving_enough():
        pass
    assert recorder.taken == 5 * GIB


@pytest.mark.parametrize("waits", [False, True])
def test_cached_weights_are_no_part_of_the_rest_of_a_step(waits, monkeypatch):
    """The peak of 30 GiB includes 20 GiB of cached weights, unless spare memory has no budget."""
    monkeypatch.setattr(spare, "waits", waits)
    monkeypatch.setattr(spare, "needed", {0: 10 * GIB})
    recorder = recorder_module.Recorder.__new__(recorder_module.Recorder)
    recorder.device, recorder.taken = 0, 2 * GIB
    monkeypatch.setattr(recorder_module, "memory", lambda *kind: 30 * GIB)
    monkeypatch.setattr(MemoryInfo, "of", lambda device: MemoryInfo(2 * GIB, 30 * GIB, 0, GIB))
    expected = pytest.raises(torch.cuda.OutOfMemoryError) if waits else contextlib.nullcontext()
    with expected, recorder.leaving_enough():
        pass


def test_layers_without_memory_are_tried_again_after_cached_weights_were_freed(monkeypatch):
    def lacks(device, taken=0, rest=None):
        if spare.waits and spare.needed:
            raise torch.OutOfMemoryError("of 1 GiB")

    def step_of(model, optimizer, step):
        if step == 3:
            spare.give_back(Waits.MEMORY, 0, 0)
            graphs.drop()
        return one_step(model, optimizer, step)

    with_free_memory(monkeypatch)
    monkeypatch.setattr(recording_module.Recorder, "require", staticmethod(lacks))
    found = compared(model_of, step_of, steps=10, base={"cache": "auto"})
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_MEMORY"} and graphs.refusals == {}
    assert found["replays"] > LAYERS * 2


def test_memory_of_kept_layers_counts_once(monkeypatch):
    """Layers keep 4 GiB each, next to 6 GiB of weights. Steps need 9 GiB, or 10 GiB while the first layer is recorded.

    So five layers fit into 31 GiB.
    """
    recorder = recorder_module.Recorder.__new__(recorder_module.Recorder)
    recorder.device, recorder.taken = 0, 0
    monkeypatch.setattr(MemoryInfo, "of", lambda device: MemoryInfo(0, 32 * GIB, 0, GIB))
    memory = {"reserved_bytes": 32 * GIB, "peak": 9 * GIB}
    monkeypatch.setattr(recorder_module, "memory", lambda device, kind, value=None: memory[value or kind])
    for layer in range(6):
        expected = contextlib.nullcontext() if layer < 5 else pytest.raises(torch.cuda.OutOfMemoryError)
        with expected, recorder.leaving_enough(held=4 * layer * GIB):
            memory["reserved_bytes"] += 4 * GIB
            memory["peak"] = max(memory["peak"], (10 + 4 * layer) * GIB)
        memory["reserved_bytes"] = 32 * GIB
    assert recorder.taken == 24 * GIB and recorder.rest == 10 * GIB


def test_memory_of_a_recording_that_is_refused_is_counted(monkeypatch):
    recorder = recorder_module.Recorder.__new__(recorder_module.Recorder)
    recorder.device, recorder.taken = 0, GIB
    monkeypatch.setattr(MemoryInfo, "of", lambda device: MemoryInfo(32 * GIB, 8 * GIB, 0, GIB))
    memory = {"reserved_bytes": 8 * GIB, "peak": 6 * GIB}
    monkeypatch.setattr(recorder_module, "memory", lambda device, kind, value=None: memory[value or kind])

    def refused():
        with recorder.leaving_enough():
            memory["reserved_bytes"] += 2 * GIB
            raise recorder_module.Refusal(Reason.GRAPH_STATE, "")

    with pytest.raises(recorder_module.Refusal):
        refused()
    assert recorder.taken == recorder.size == 3 * GIB


@pytest.mark.parametrize(
    ("taken", "free", "expected"), [(0, 100, True), (1, 23, True), (1, 24, False)], ids=["first", "short", "plenty"]
)
def test_a_new_length_finds_room(taken, free, expected, monkeypatch):
    """A step takes up to 10 GiB of memory, of which PyTorch still holds 12 GiB unused. The margin is 2 GiB."""
    recorder = recorder_module.Recorder.__new__(recorder_module.Recorder)
    recorder.device, recorder.taken, given = 0, taken * GIB, []
    monkeypatch.setattr(MemoryInfo, "of", lambda device: MemoryInfo(free * GIB, 20 * GIB, 0, 2 * GIB))
    memory = {"allocated_bytes": 8 * GIB, "peak": 10 * GIB}
    monkeypatch.setattr(recorder_module, "memory", lambda device, kind, value=None: memory[value or kind])
    monkeypatch.setattr(recorder_module, "give_back", lambda: given.append(True))
    recorder.make_room()
    assert bool(given) is expected


@pytest.mark.parametrize(("replayed_on", "expected"), [(0, "default"), (7, "external 7")])
def test_weights_that_fill_the_cache_are_decoded_on_the_stream_of_the_replays(replayed_on, expected, monkeypatch):
    recorder = recorder_module.Recorder.__new__(recorder_module.Recorder)
    recorder.device, recorder.replay_stream, recorder.taken, recorder.begun = 0, replayed_on, 0, 5 * GIB
    entered, waited, found = [], [], iter([6 * GIB, 9 * GIB, 10 * GIB])
    recorder.stream = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(recorder_module, "memory", lambda *kind: next(found))
    monkeypatch.setattr(torch.cuda, "stream", lambda each: contextlib.nullcontext(entered.append(each)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: f"external {pointer}")
    with recorder.outside():
        pass
    assert entered == waited == [expected]
    assert recorder.size == 2 * GIB


def test_no_memory_for_a_first_recording(monkeypatch):
    """No memory is taken, and PyTorch's unused memory is not given back."""

    def lacks(device, taken=0, rest=None):
        raise torch.OutOfMemoryError("of 1 GiB")

    monkeypatch.setattr(recording_module.Recorder, "require", staticmethod(lacks))
    monkeypatch.setattr(recording_module.Recorder, "make_room", pytest.fail)
    found = compared(model_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_MEMORY"} and not found["replays"] and not graphs.recorders


@pytest.mark.gpu
def test_too_little_memory_for_the_rest_of_a_step(monkeypatch):
    memory = recorder_module.memory
    monkeypatch.setattr(recorder_module, "memory", lambda *kind: 2**60 if "peak" in kind else memory(*kind))
    found = compared(model_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_MEMORY"} and not found["replays"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("lengths", "captured", "reasons"),
    [
        ((16, 32), [16] * LAYERS + [16] * LAYERS + [32, *[32] * LAYERS] + [16] * LAYERS, set()),
        ((32, 16), [32] * LAYERS + [16] + [32] * LAYERS, {"GRAPH_MEMORY"}),
    ],
    ids=["longer", "shorter"],
)
def test_no_memory_for_two_lengths(lengths, captured, reasons, monkeypatch, at_the_third_call):
    """If a longer input finds no memory, the graphs of shorter inputs are dropped. If a shorter input finds none, it stays eager.

    The graphs of shorter inputs are captured again at the next call, and use the memory of the longer input.
    """
    attempts = []

    class Fits(recording_module.GraphedLayer):
        def __init__(self, pool, task):
            length = task.x.shape[1]
            attempts.append(length)
            before = vars(pool).setdefault("lengths", [])
            needed = sum({length, *before}) if reasons or not before or length > before[0] else before[0]
            if needed > 32:
                raise torch.cuda.OutOfMemoryError("no memory")
            super().__init__(pool, task)
            before.append(length)

    monkeypatch.setattr(recording_module, "GraphedLayer", Fits)
    found = compared(model_of, step_of_lengths(lambda step: lengths[step % 2 if step > 3 else 0]), steps=14)
    assert attempts == captured
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} | reasons


def test_no_memory_for_the_pool(monkeypatch):
    class Unallocated(recorder_module.Recorder if GPU else recorders.Rerun):
        def prepare(self):
            raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(recording_module, "Recorder", Unallocated)
    found = compared(model_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_MEMORY"} and not found["replays"]


@pytest.mark.full
@pytest.mark.parametrize("how", thinned(("next model", "disable", "release"), 2))
def test_no_memory_is_forgotten(how, monkeypatch):
    """If a layer found no memory, its whole model stays eager.

    A later model does not, and neither does this one after disable() or release().
    """

    class Unallocated(recording_module.GraphedLayer):
        def __init__(self, *arguments):
            raise torch.cuda.OutOfMemoryError("no memory")

    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        with monkeypatch.context() as patch:
            patch.setattr(recording_module, "GraphedLayer", Unallocated)
            found = run(model, one_step, graphs="auto")
        assert "GRAPH_MEMORY" in found["reasons"] and not found["replays"]
        assert not run(model, one_step, graphs="auto")["replays"]
        if how == "disable":
            nf4_patch.disable()
        if how == "release":
            nf4_patch.release()
        if how == "next model":
            del model
            gc.collect()
            model = model_of()
        assert run(model, one_step, graphs="auto")["replays"] == LAYERS * (STEPS - EAGER)


@pytest.mark.gpu
def test_memory_is_given_back():
    model = model_of()
    with nf4_patch.enabled():
        run(model, one_step)
    gc.collect()
    torch.cuda.empty_cache()
    run(model, one_step, graphs="auto")  # cuBLAS makes a workspace for the capture stream
    gc.collect()
    torch.cuda.empty_cache()
    before, replays = torch.cuda.memory_reserved(), graphs.replays
    run(model, one_step, graphs="auto")
    nf4_patch.disable()
    gc.collect()
    torch.cuda.empty_cache()
    assert graphs.replays > replays
    assert torch.cuda.memory_reserved() <= before + 2**21
    assert nf4_patch.status().graphs.layers == 0


@pytest.mark.full
def test_interrupt_and_the_next_model():
    torch.manual_seed(0)
    eager = run(model_of(), one_step)
    with nf4_patch.enabled(graphs="auto"):
        model = model_of()
        run(model, one_step, graphs="auto")
        handle = layers_of(model)[1].mlp.act_fn.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0)
        handle.remove()
        loss_of(model, 1)  # never goes backward
        del model
        gc.collect()
        torch.manual_seed(0)
        found = run(model_of(), one_step, graphs="auto")
        assert_same(eager, found)
        assert found["replays"] == LAYERS * (STEPS - EAGER)


def interrupt(module, arguments):
    raise KeyboardInterrupt


@pytest.mark.gpu
def test_interrupt_in_a_capture():
    torch.manual_seed(0)
    eager = run(model_of(), one_step)
    model = model_of()
    REMOTE.captured.clear()
    layers_of(model)[1].mlp = REMOTE.Interrupting(layers_of(model)[1].mlp)
    with nf4_patch.enabled(graphs="auto"), pytest.raises(KeyboardInterrupt):
        run(model, one_step, graphs="auto")
    layers_of(model)[1].mlp = layers_of(model)[1].mlp.inner
    torch.manual_seed(0)
    found = run(model, one_step, graphs="auto")
    assert_same(eager, found)
    assert found["replays"] > 0


# --- generation ---


def generated(model: Any, length: int = TOKENS, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens after a prompt, and the logits of each token."""
    prompt = tokens(0, 6)
    result = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, min_new_tokens=length,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return result.sequences[:, 6:], torch.stack(result.logits)


def rollouts(model: Any, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Run rollouts as in TRL's GRPO, with a training step after each. Checkpointing is off while the model generates."""
    optimizer = optimizer_of(model, lr=1e-2)
    found = []
    for step in range(ROLLOUTS):
        model.gradient_checkpointing_disable()
        torch.manual_seed(step)
        found.append(generated(model, disable_compile=True, **options))
        model.gradient_checkpointing_enable()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=tokens(step), labels=tokens(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
    return found


@pytest.mark.full
@pytest.mark.parametrize(("dropout", "sample"), crossed((0.0, 0.1), (False, True)))
def test_generation_with_a_static_cache(sample, dropout):
    """Each rollout has a new static cache. Its decode steps replay, with the adapter of the last optimizer step."""
    options = {"cache_implementation": "static", "do_sample": sample}
    with nf4_patch.enabled():
        eager = rollouts(model_of(lora_dropout=dropout), **options)
    before = graphs.replays
    counters.reset()
    with nf4_patch.enabled(graphs="auto"):
        graphed = rollouts(model_of(lora_dropout=dropout), **options)
    for ours, theirs in zip(graphed, eager, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    reasons = {reason for (target, reason) in counters.fallbacks if target == TARGET}
    assert reasons == {Reason.GRAPH_NEW_SHAPE}
    # the first decode step of the first rollout runs eagerly, one after the largest batch, and the first training steps
    assert graphs.replays - before == LAYERS * (ROLLOUTS * (TOKENS - 1) - 2 + ROLLOUTS - EAGER)


@pytest.mark.full
def test_generation_without_a_static_cache():
    model = model_of()
    counters.reset()
    with nf4_patch.enabled(graphs="auto"):
        rollouts(model)
    assert counters.fallbacks[TARGET, Reason.GRAPH_NOT_TRAINING] == LAYERS * ROLLOUTS * TOKENS


def test_a_static_cache_that_moves():
    """Between the steps, beams are reordered into other tensors."""
    model = model_of(inputs=False).eval()
    options = {"cache_implementation": "static", "disable_compile": True, "do_sample": False, "num_beams": 2}
    with nf4_patch.enabled():
        eager = generated(model, 2 * TOKENS, **options)
    with nf4_patch.enabled(graphs="auto"):
        for _ in range(2):
            found = generated(model, 2 * TOKENS, **options)
            assert torch.equal(found[0], eager[0]) and torch.equal(found[1], eager[1])


DECODED, CHANGED = (15, 9) if GPU else (8, 4)


def decoded(model: Any, caches: Any, change: Callable[[Any, int], Any] = lambda model, token: None) -> list[Tensor]:
    """Return the logits of DECODED tokens for a padded prompt. The caches alternate, one token at a time."""
    logits, mask = [], torch.ones_like(tokens(0, 6))
    mask[0, :2] = 0
    with torch.no_grad():
        ids = [tokens(each, 6) for each in range(len(caches))]
        for token in range(DECODED):
            change(model, token)
            for each, static_cache in enumerate(caches):
                found = model(input_ids=ids[each], attention_mask=mask, past_key_values=static_cache).logits[:, -1:]
                ids[each] = found.argmax(-1)
                logits.append(found)
            mask = torch.cat((mask, mask[:, -1:]), 1)
    return logits


def interrupted(model: Any, token: int) -> None:
    if token == CHANGED:  # in the second layer of a step that does not count
        handle = layers_of(model)[1].mlp.act_fn.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=tokens(0, 1), past_key_values=caches_of(model, 1)[0])
        handle.remove()


def caches_of(model: Any, count: int) -> list[Any]:
    from transformers import StaticCache

    return [StaticCache(config=model.config, max_cache_len=32) for _ in range(count)]


def test_a_static_cache_in_host_memory_gets_no_graphs():
    model = model_of(inputs=False).eval()
    (static_cache,), layer = caches_of(model, 1), layers_of(model)[0]
    with torch.no_grad():
        assert calls_module.static_cache_of(layer, {"past_key_values": static_cache}) == (
            "past_key_values",
            static_cache,
        )
        static_cache.offloading = True
        assert calls_module.static_cache_of(layer, {"past_key_values": static_cache}) == ("", None)


BETWEEN_TOKENS = {
    "nothing": lambda model, token: None,
    "weight": lambda model, token: written_weight(model) if token == CHANGED else None,
    "training": lambda model, token: model.train(token == CHANGED),
    "scaling": lambda model, token: scaling(model) if token == CHANGED else None,
    "disabled": lambda model, token: model.disable_adapter_layers() if token == CHANGED else None,
    "release": lambda model, token: nf4_patch.release() if token == CHANGED else None,
    "interrupt": interrupted,
}


@pytest.mark.full
@pytest.mark.parametrize("change", thinned(BETWEEN_TOKENS, 3))
def test_changes_between_tokens(change):
    """Two static caches alternate. They are then reset and used a second time."""
    change = BETWEEN_TOKENS[change]
    torch.manual_seed(0)
    model = model_of(inputs=False).eval()
    model.gradient_checkpointing_disable()
    with nf4_patch.enabled():
        eager = decoded(model, caches_of(model, 2), change)
    torch.manual_seed(0)
    model = model_of(inputs=False).eval()
    model.gradient_checkpointing_disable()
    caches, before = caches_of(model, 2), graphs.replays
    with nf4_patch.enabled(graphs="auto"):
        found = decoded(model, caches, change)
        assert graphs.replays > before and all(map(torch.equal, found, eager))
        for each in caches:
            each.reset()
        again = decoded(model, caches)
    with nf4_patch.enabled():
        for each in caches:
            each.reset()
        assert all(map(torch.equal, again, decoded(model, caches)))


def test_reasons():
    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        cases: dict[Reason, Any] = {
            Reason.GRAPH_NOT_TRAINING: torch.no_grad(),
            Reason.GRAPH_MODE: torch.autograd.set_detect_anomaly(True, check_nan=False),
        }
        for reason, context in cases.items():
            counters.reset()
            with context:
                loss_of(model, 0)
            assert counters.fallbacks[TARGET, reason] == LAYERS
        counters.reset()
        with nf4_patch.enabled(offload="all"):
            loss_of(model, 0)
        assert counters.fallbacks[TARGET, Reason.GRAPH_MODE] == LAYERS
        counters.reset()
        loss_of(model, 0, output_hidden_states=True)
        assert counters.fallbacks[TARGET, Reason.GRAPH_HOOKED] == LAYERS
        counters.reset()
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(),) * 2}
        )
        loss_of(model, 0)
        assert counters.fallbacks[TARGET, Reason.GRAPH_CHECKPOINT] == LAYERS
        counters.reset()

        @functools.wraps(torch.utils.checkpoint.checkpoint)
        def wrapper(*args, **kwargs):
            return torch.utils.checkpoint.checkpoint(*args, **kwargs)

        function = partial(wrapper, use_reentrant=False)
        model.base_model.model._set_gradient_checkpointing(True, function)
        loss_of(model, 0)
        assert counters.fallbacks[TARGET, Reason.GRAPH_CHECKPOINT] == LAYERS


@pytest.mark.full
def test_hidden_states_once_and_graphs_afterwards():
    """transformers' hooks stay installed after outputs were recorded once, but do nothing later."""

    def step_of(model, optimizer, step):
        return backward(loss_of(model, step, output_hidden_states=step in (0, RECORDED_AT + 1)))

    assert compared(model_of, step_of, LAST)["replays"]


# --- mixtures ---


def mixture(name: str = "qwen3") -> Any:
    from tiny_experts import model_of, with_lora

    with nf4_patch.enabled(experts="4bit"):
        model = with_lora(model_of(name, lora=False).to(DEVICE))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def step_of_mixture(model: Any, optimizer: Any, step: int) -> list[float]:
    ids = tokens(step) % 96
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    return backward(loss)


@pytest.mark.full
@pytest.mark.parametrize("base", thinned(({}, {"lora": "fused"}, {"cache": "1GiB"}), 2), ids=str)
def test_packed_experts(base):
    found = compared(mixture, step_of_mixture, base={"experts": "4bit", **base})
    assert found["replays"] and found["reasons"] == {"GRAPH_NEW_SHAPE"}


@pytest.mark.full
def test_the_experts_state_is_another():
    """If an equal quant_state replaces that of a stack, graphs read it at its new addresses."""

    def step_of(model, optimizer, step):
        if step == CHANGE:
            for module in model.modules():
                if type(module).__name__ == "Bnb4bitParametrization":
                    state, module.quant_state = module.quant_state, copy.deepcopy(module.quant_state)
                    state.absmax.zero_()
        return step_of_mixture(model, optimizer, step)

    found = compared(mixture, step_of, base={"experts": "4bit"}, steps=LAST)
    assert found["replays"] and "GRAPH_CHANGED" in found["reasons"]


# --- what people run ---

# Importing Unsloth would change the libraries of the tests that run later in this process.
NEEDS_UNSLOTH = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed")


@NEEDS_UNSLOTH
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("unsloth",), ("unsloth", "mixture")], ids=" ".join)
def test_unsloth(words):
    program = Path(__file__).parents[1] / "programs" / "graphed_unsloth.py"
    result = subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout.endswith("equal\n"), result.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["peft", pytest.param("unsloth", marks=[pytest.mark.slow, NEEDS_UNSLOTH])])
def test_ddp(kind, tmp_path):
    program = Path(__file__).parents[1] / "programs" / "graphs_ddp.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(program), *([kind] if kind == "unsloth" else [])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count(f"equal, {3 * (12 - 2)} replays") == 2


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "packing", [("--packing", "--packing_strategy", "wrapped"), ("--pad_to_multiple_of", "64")], ids=str
)
def test_script_of_trl(packing, tmp_path):
    """Run the unchanged ``trl sft`` with variables alone. Losses equal those of the eager run, and layers ran as graphs."""
    pytest.importorskip("trl")
    from benchmarks.checkpoint import save_config

    save_config(tmp_path / "model", config_of(SHAPE, torch.bfloat16), "cuda")
    rows = [{"text": " ".join(["word"] * (20 + index % 60))} for index in range(200)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))

    # With two GPUs, transformers' Trainer would use DataParallel, which TRL does not support.
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}

    def losses(**variables: str) -> tuple[list[str], str]:
        command = [
            sys.executable, "-m", "nf4_patch", "run", "--report", sys.executable, "-m", "trl.scripts.sft",
            "--model_name_or_path", "model", "--dataset_name", "data", "--load_in_4bit", "--use_peft", "--lora_target_modules",
            "all-linear", "--max_length", "64", "--max_steps", "8", "--logging_steps", "1", "--report_to", "none",
            "--output_dir", "out", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--save_strategy",
            "no", *packing,
        ]  # fmt: skip
        result = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, **one_gpu, "NF4_PATCH": "1", **variables},
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return re.findall(r"'loss': '?([\d.e-]+)", result.stdout + result.stderr), result.stderr

    eager, _ = losses()
    graphed, report = losses(NF4_PATCH_GRAPHS="auto")
    assert graphed == eager and len(eager) == 8
    replays = int(re.search(r'graphs="auto": ([\d,]+) of', report)[1].replace(",", ""))
    assert replays >= 3 * 8 and "GRAPH_BACKWARD" not in report
