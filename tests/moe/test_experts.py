"""Training and generation of transformers' mixtures with packed experts: bit-identical results, and the stacks that are
saved and decoded.
"""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import bitsandbytes.functional as F
import pytest
import torch
from alternation import alternating, crossed
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from tiny_experts import (
    CHECKPOINTING,
    CONFIGS,
    DEVICE,
    LAYERS,
    SKIPPED,
    STACKS,
    Layer,
    decoded,
    experts_of,
    hits,
    ids_of,
    in_4bit,
    loaded,
    model_of,
    random_model,
    reasons,
    same,
    saved,
    step,
    with_lora,
)
from torch._dynamo.testing import CompileCounterWithBackend

import nf4_patch
from nf4_patch.cache.store import cache
from nf4_patch.libraries.bitsandbytes import packed
from nf4_patch.libraries.bitsandbytes.stacks import is_managed, packed_chains, stacks_of
from nf4_patch.libraries.transformers import experts as adapter
from nf4_patch.moe.read import PackedExperts
from nf4_patch.patching.counters import counters, warn_once
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

ON = {"experts": "4bit"}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "form"), crossed(CONFIGS, itertools.product((torch.float16, torch.bfloat16), (False, True))), ids=str
)
def test_dtypes_and_layouts(name, form, patched):
    dtype, nested = form
    model = model_of(name, dtype, nested)
    ours = step(model)
    assert hits() == 4 * LAYERS and not reasons()
    patched.disable()
    assert same(ours, step(model))


@pytest.mark.every(2)
@pytest.mark.parametrize("lora", [False, True], ids=["frozen", "LoRA on them"])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_dense_is_saved(name, lora, patched, monkeypatch):
    model = with_lora(model_of(name, lora=False)) if lora else model_of(name)
    with decoded(monkeypatch) as storages:
        ours = model(input_ids=ids_of(), labels=ids_of()).loss
        assert len(storages) == 2 * LAYERS and all(storage.expired() for storage in storages)
        ours.backward()
        assert len(storages) == 4 * LAYERS and all(storage.expired() for storage in storages)
        patched.disable()
        storages.clear()
        stock = model(input_ids=ids_of(), labels=ids_of()).loss
        assert lora or (len(storages) == 2 * LAYERS and not any(storage.expired() for storage in storages))
    assert lora or torch.equal(ours, stock)


@pytest.mark.parametrize("checkpointing", ["reentrant", "recomputed"])
def test_as_many_decodes_as_stock_under_checkpointing(checkpointing, patched, monkeypatch):
    model = model_of("qwen3")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    with decoded(monkeypatch) as storages:
        step(model)
        ours = len(storages)
        assert not reasons() and hits() == 4 * LAYERS
        patched.disable()
        storages.clear()
        step(model)
    assert ours == len(storages) == 4 * LAYERS


CACHED = {"none": 0, "half": 0.5, "all": 1}  # of the dense stacks: how much of the reads it saves


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "how"), alternating(CONFIGS, itertools.product(CHECKPOINTING, CACHED)), ids=str)
def test_a_step_is_the_same_to_the_bit(name, how, patched):
    checkpointing, part = how
    model = model_of(name)
    if CHECKPOINTING[checkpointing]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
    patched.enable(cache="off" if part == "none" else "1GiB")
    if part == "half":
        step(model)
        patched.enable(cache=f"{sum(cache.snapshot().taken.values()) // 2}B")
    ours = [step(model)]
    hits, misses = cache.hits, cache.misses
    ours.append(step(model))
    reads = cache.hits - hits + cache.misses - misses
    assert cache.hits - hits == CACHED[part] * reads
    assert bool(reads) == (part != "none")
    assert sum(cache.snapshot().taken.values()) <= cache.budget and (part == "half" or not cache.uncached)
    assert not reasons()
    patched.disable()
    stock = step(model)
    assert len(stock) > 4 * LAYERS
    assert same(ours[0], stock) and same(ours[1], stock)


def test_two_backwards_and_a_backward_after_disable(patched):
    model = model_of("qwen3")

    def gradients(*loss) -> list[torch.Tensor]:
        wanted = [p for p in model.parameters() if p.requires_grad]
        return [g for one in loss for g in torch.autograd.grad(one, wanted, retain_graph=True)]

    loss = model(input_ids=ids_of(), labels=ids_of()).loss
    first, second = gradients(loss), gradients(loss)
    patched.disable()
    stock = gradients(model(input_ids=ids_of(), labels=ids_of()).loss)
    for ours in (first, second, gradients(loss)):
        assert all(map(torch.equal, ours, stock))


def test_experts_that_were_quantized_in_inference_mode(patched):
    with torch.inference_mode():
        layer = Layer()
    layer.hidden, layer.weights = layer.hidden.detach().clone().requires_grad_(), layer.weights.clone()
    assert layer.chain().original.is_inference()
    ours = layer.step()
    assert hits() == 4 and all(map(torch.equal, ours, layer.stock()))


def test_a_second_parametrization_stays_dense(patched):
    """A second parametrization, such as peft's ``target_parameters`` adds, changes the decoded stack. The original forward uses the sum."""

    class Plus(torch.nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.delta = torch.nn.Parameter(torch.full(shape, 0.01, dtype=torch.bfloat16, device=DEVICE))

        def forward(self, weight):
            return weight + self.delta

    model = model_of("qwen3", lora=False)
    both, one = experts_of(model)
    for module, names in ((both, STACKS), (one, STACKS[:1])):
        for stack in names:
            shape = getattr(module, stack).shape
            torch.nn.utils.parametrize.register_parametrization(module, stack, Plus(shape), unsafe=True)
    with torch.backends.mkldnn.flags(
        enabled=False
    ):  # with AVX-512, its bf16 products round by the layout of their inputs
        ours = step(model)
        assert reasons() == {Reason.SECOND_PARAMETRIZATION: 1} and hits() == 2  # the other layer's down_proj
        patched.disable()
        assert same(ours, step(model))


def test_16_bit_experts(patched):
    model = random_model("qwen3", device=DEVICE)
    ours = step(model)
    assert reasons() == {Reason.EXPERTS_NOT_PACKED: LAYERS} and hits() == 0
    patched.disable()
    assert same(ours, step(model))


@pytest.mark.parametrize("what", ["all", "but one", "loaded", "plain"])
def test_experts_that_were_loaded_before_the_option(what, patched, monkeypatch, caplog, tmp_path):
    """Warn once. Do not warn if some experts are packed, if the user skipped them, or without the option."""
    monkeypatch.setattr(adapter.Loads, "seen", False)
    adapter.is_nothing_packed.cache_clear()
    warn_once.cache_clear()
    patched.enable(experts="off" if what == "plain" else "4bit")
    model = random_model("qwen3", device=DEVICE)
    if what == "loaded":
        saved(model, tmp_path)
        skipped = in_4bit(llm_int8_skip_modules=[*SKIPPED, "experts"])
        model = loaded(tmp_path, quantization_config=skipped, device_map={"": DEVICE})
    if what == "but one":
        replace_parameter_4bit(experts_of(model)[1], STACKS[1])
    monkeypatch.setattr(gc, "get_objects", lambda: list(model.modules()))  # those of other tests may be alive
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=ids_of(4))
    said = [record.getMessage() for record in caplog.records if "are not packed" in record.getMessage()]
    assert len(said) == (what == "all")
    assert all("Qwen3MoeExperts" in each and 'enable(experts="4bit")' in each for each in said)


def weights():
    return {(each.shape, each.dtype, each.kernel): each.weights for each in nf4_patch.status().shapes if each.weights}


@pytest.mark.every(2)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_decodes_the_experts_that_are_needed(name, nested, patched):
    model = model_of(name, nested=nested, lora=False).eval()
    model.set_experts_implementation("batched_mm")
    before = weights()
    with torch.no_grad():
        ours = model(input_ids=ids_of(1)).logits
        torn = nested and name == "gpt-oss"  # its down_proj: all experts of it are decoded
        assert hits("batched_mm") == 2 * LAYERS
        assert reasons("batched_mm") == ({Reason.EXPERT_BLOCKS: LAYERS} if torn else {})
        experts = {
            shape[0]
            for (target, shape, *_), counter in counters.hit_counters.items()
            if "batched" in target and counter.hits
        }
        assert experts == ({4, 6} if torn else {4})  # two rows of two experts each, of six
        after = {key: count for key, count in weights().items() if key[0][0] == 4}
        assert after.items() <= before.items()  # a choice of experts is no weight
        patched.disable()
        assert torch.equal(ours, model(input_ids=ids_of(1)).logits)


def test_experts_that_share_a_quantization_block_are_decoded_together(patched):
    """Two experts of 64 x 128 elements share the only block of the second level. Two of 3 x 32 share a block of the first."""
    ids = torch.tensor([1, 0, 1], device=DEVICE)
    for shape, nested in (((2, 64, 128), True), ((2, 3, 32), False)):
        stack = torch.randn(shape, device=DEVICE).bfloat16()
        weight, state = F.quantize_4bit(stack, quant_type="nf4", compress_statistics=nested)
        experts = PackedExperts(weight, state, Dequantizer("test"))
        assert torch.equal(experts[ids], experts.dense()[ids])
        assert counters.fallbacks.pop(("test", Reason.EXPERT_BLOCKS)) == 1 and not counters.fallbacks


@pytest.mark.full
def test_compiled_graphs_are_as_without_the_patch(patched):
    layer = Layer()

    def explained() -> tuple[int, int]:
        torch._dynamo.reset()
        # inside a function: of a module by itself Dynamo counts one graph whatever its forward does
        found = torch._dynamo.explain(lambda hidden: layer.experts(hidden, layer.ids, layer.weights) * 1)(layer.hidden)
        return found.graph_count, found.graph_break_count

    ours = explained()
    assert ours == layer.stock(explained)


@pytest.mark.full
def test_a_compiled_model_is_no_larger_graph_than_without_the_patch(patched, fresh_dynamo):
    """With the option, the model compiles once, to one graph, with one operation per stack instead of four."""
    model = model_of("qwen3")

    def counted() -> tuple[int, int]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter)
        for _ in range(2):
            compiled(input_ids=ids_of(), labels=ids_of()).loss.backward()
        return counter.frame_count, counter.op_count

    ours = counted()
    patched.disable()
    assert counted() == (ours[0], ours[1] + 3 * 2 * LAYERS) and ours[0] == 1


def test_no_expert_is_no_decode(patched, monkeypatch):
    """A batch needs no expert if none of its tokens goes to a process's experts."""
    module = experts_of(model_of("qwen3"))[0]
    stack = stacks_of(module, Dequantizer("test"))["down_proj"]
    want = stack.dense()[:0]
    monkeypatch.setattr(type(stack), "select", None)
    found = stack[torch.empty(0, dtype=torch.int64)]
    assert found.shape == want.shape and found.dtype is want.dtype


def test_a_stack_that_bitsandbytes_packed_is_not_ours():
    (module,) = experts_of(model_of("qwen3"))[:1]
    (chain,) = list(packed_chains(module).values())[:1]
    assert not is_managed(chain)
    ours = torch.Tensor._make_subclass(packed.Params4bit, chain.original.data)
    assert is_managed(SimpleNamespace(original=ours))
