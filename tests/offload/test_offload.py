"""enable(experts="4bit", offload=...) keeps packed experts in host memory and prefetches them to the GPU.

Without a GPU, CPU tensors stand in for CUDA. With a GPU, only the tests with the fixture ``anywhere`` run, and
gpu/test_offload_gpu.py has the others.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections import Counter
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from changes import another
from host_memory import Cuda
from interrupts import interrupted_at_every_line
from offloaded import (
    all_in_host,
    check_merging,
    counts,
    dense,
    in_host,
    logits,
    model_of,
    none_in_host,
    packed_of,
    read_again,
    same_steps,
    sizes_of,
    tensors_of,
    train,
)
from threads import together
from tiny_experts import CHECKPOINTING, STACKS, experts_of, ids_of, in_4bit, loaded, random_model, saved, with_lora

import nf4_patch
from nf4_patch.cache.store import cache
from nf4_patch.libraries.bitsandbytes.stacks import stacks_of
from nf4_patch.moe.read import PackedExperts
from nf4_patch.offload import host_memory, planning, prefetch
from nf4_patch.patching.config import ConfigError
from nf4_patch.patching.dequantizer import Dequantizer

LAYERS, STEPS = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("qwen3")
    saved(random_model("qwen3", num_hidden_layers=LAYERS), place)
    return place


@pytest.fixture
def anywhere(monkeypatch):
    gc.collect()
    if not torch.cuda.is_available():
        monkeypatch.setattr(host_memory, "cuda", Cuda())
    prefetch.prefetchers.clear()
    yield host_memory.cuda
    nf4_patch.disable()
    gc.collect()


@pytest.fixture
def gpu(anywhere):
    if torch.cuda.is_available():
        pytest.skip("looks at what plays CUDA")
    return anywhere


# --- the numbers ---


EACH = [("recomputed", True), ("kept", False)]
OTHERS = [(way, nested) for way in CHECKPOINTING for nested in (True, False) if (way, nested) not in EACH]


@pytest.mark.every(2)
@pytest.mark.parametrize(("way", "nested"), [*EACH, *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS)])
def test_steps_are_those_of_the_resident_model(folder, gpu, patched, way, nested):
    want = train(with_lora(model_of(folder, "off", nested=nested)), checkpointing=CHECKPOINTING[way])
    assert not gpu.pinned
    model = with_lora(model_of(folder, nested=nested))
    assert all_in_host(model) and len(gpu.pinned) == LAYERS
    got = train(model, checkpointing=CHECKPOINTING[way])
    assert same_steps(got, want) and want[0][0] != want[0][-1]
    # forward and back, and the two layers at the turns stay: from the second step on all are ahead
    assert counts().fetches >= STEPS * 2 * (LAYERS - 2)
    assert counts().fetches <= STEPS * 2 * LAYERS
    before = counts().late
    gpu.copies.clear()
    train(model, steps=1)
    assert counts().late == before
    blocks = Counter(gpu.copies)  # a layer is fetched once for recompute and backward
    assert max(blocks.values()) <= 2 and sum(blocks.values()) <= 2 * (LAYERS - 1)


def test_generation_evaluation_and_a_skipped_layer(folder, anywhere, patched):
    with torch.no_grad():
        wanted = [model_of(folder, "off").eval().generate(ids_of(6), max_new_tokens=4, do_sample=False)]
        model = model_of(folder).eval()
        assert torch.equal(model.generate(ids_of(6), max_new_tokens=4, do_sample=False), wanted[0])
        for layers in ([0, 1, 2, 3], [0, 2, 3], [3, 1], [0, 1, 2, 3], [2, 2, 0]):
            for layer in layers:
                module = experts_of(model)[layer]
                for name in STACKS:
                    stack = dense(module, name)
                    assert torch.equal(stack, getattr(module, name))


@pytest.mark.full
def test_merging_is_seen(folder, anywhere, patched):
    resident, model = (with_lora(model_of(folder, where)) for where in ("off", "all"))
    for each in (resident, model):
        train(each, steps=1)
    check_merging(resident, model, logits)


def test_written_in_place_after_it_has_arrived(folder, gpu, patched):
    model = model_of(folder)
    module = experts_of(model)[0]
    dense(module, STACKS[0])
    with torch.no_grad():
        original = module.parametrizations[STACKS[0]].original
        original.copy_(original.flip(0))
    got = dense(module, STACKS[0])
    assert torch.equal(got, getattr(module, STACKS[0]))
    # the layer is copied once, and the stack again after the write
    assert counts().fetches == counts().late == 1 and len(gpu.copies) == 1 + 3
    # for what may write, twice, and for a use in between
    assert prefetch.prefetchers[original.device].stream.waited_for.count(gpu.compute) == 3


def test_memory_gets_another_block_after_its_last_use(folder, gpu, patched):
    model = model_of(folder)
    logits(model)
    (prefetcher,) = prefetch.prefetchers.values()
    prefetcher.stream.waited_for.clear()
    for module in experts_of(model)[:2]:  # the last two are there
        dense(module)
    # for the uses of four blocks, the last one fetched ahead; and for what writes, as the first two are fetched late
    assert prefetcher.stream.waited_for.count(gpu.compute) == 3 + 2


def test_replaced_after_it_has_arrived(folder, gpu, patched):
    """Replace a prefetched stack by another parameter in the same memory, and by a tensor on the GPU."""
    model = model_of(folder)
    chain = experts_of(model)[0].parametrizations[STACKS[0]]
    dense(experts_of(model)[0])
    state = chain[0].quant_state.as_dict(packed=True)
    again = type(chain.original).from_prequantized(chain.original.data, state, device=torch.device("cpu"))
    with torch.no_grad():
        again.copy_(again.flip(0))  # which the first parameter does not count
    assert again.data_ptr() == chain.original.data_ptr()
    chain.original = again
    assert torch.equal(dense(experts_of(model)[0]), experts_of(model)[0].gate_up_proj)
    fetches = counts().fetches
    del again
    chain.original.data = chain.original.flip(0).clone()
    assert torch.equal(dense(experts_of(model)[0]), experts_of(model)[0].gate_up_proj)
    assert counts().fetches == fetches
    assert len(gpu.pinned) == LAYERS  # the other stack of the layer lies there still


def test_swapped_after_it_has_arrived(folder, gpu, patched):
    """``swap_tensors`` refuses a tensor with weak references."""
    module = experts_of(model_of(folder))[0]
    chain = module.parametrizations[STACKS[0]]
    for swapped in (chain.original, chain[0].quant_state.absmax):
        dense(module)
        torch.utils.swap_tensors(swapped, another(swapped, swapped.detach().flip(0)))
        assert torch.equal(dense(module), getattr(module, STACKS[0]))


def test_swapped_after_offload_was_switched_off(folder, gpu, patched):
    module = experts_of(model_of(folder))[0]
    dense(module)
    patched.disable()
    swapped = module.parametrizations[STACKS[0]].original
    torch.utils.swap_tensors(swapped, another(swapped, swapped.detach().clone()))


@pytest.mark.full
def test_in_a_block_and_in_traced_code(folder, gpu, patched, fresh_dynamo):
    """After an ``enabled()`` block, and under torch.compile, the stack is read directly from host memory."""
    with patched.enabled(experts="4bit", offload="all"):
        model = read_again(folder, quantization_config=in_4bit())
        want = logits(model)
    assert all(in_host(model).values()) and not counts().resident
    before = counts().fetches
    assert torch.equal(logits(model), want)
    patched.enable(experts="4bit", offload="all")
    module = experts_of(model)[0]
    stack = torch.compile(lambda: module.gate_up_proj, backend="eager")()
    assert counts().fetches == before and torch.equal(stack, dense(module))


def test_two_parameters_of_the_same_memory(folder, gpu, patched):
    """A write through one parameter is seen by the other, although each has its own version counter."""
    module = experts_of(model_of(folder))[0]
    stack = stacks_of(module, Dequantizer("test"))[STACKS[0]]
    state = stack.state.as_dict(packed=True)
    packed: Any = type(stack.packed).from_prequantized(stack.packed.data, state, device=torch.device("cpu"))
    other = dataclasses.replace(stack, packed=packed)
    for each in (stack, other, stack):  # the last is as it was at first, and what is in the buffer is not
        assert torch.equal(each.dense(), module.gate_up_proj)
        with torch.no_grad():
            packed.copy_(packed.roll(1, 0))


def test_a_part_of_it_is_read_where_it_lies(folder, gpu, patched):
    module = experts_of(model_of(folder, nested=False))[0]
    stack = stacks_of(module, Dequantizer("test"))[STACKS[0]]
    state = copy.copy(stack.state)
    state.absmax, state.shape = state.absmax[: len(state.absmax) // 2], torch.Size((3, *state.shape[1:]))
    half = PackedExperts(stack.packed[: len(stack.packed) // 2], state, stack.dequantizer)
    for _ in range(2):
        assert torch.equal(half.dense(), stack.dense()[:3])


@pytest.mark.full
def test_after_inference_mode(folder, gpu, patched):
    found = []
    for where in ("off", "all"):  # on a CPU bitsandbytes packs linear layers otherwise from then on
        model = with_lora(model_of(folder, where))
        with torch.inference_mode():
            model(input_ids=ids_of())
        found.append(train(model))
    assert counts().fetches and same_steps(*found)


@pytest.mark.full
def test_named_after_loading(folder, anywhere, patched):
    """Switching the option after loading moves nothing, in either direction."""
    resident, model = model_of(folder, "off"), model_of(folder)
    for where in ("all", "1GiB", "off"):
        patched.enable(offload=where)
        assert torch.equal(logits(resident), logits(model))
        assert all(in_host(model).values()) and not any(in_host(resident).values())


@pytest.mark.full
def test_state_dict_copy_save_and_read_again(folder, anywhere, patched, tmp_path):
    resident, model = (model_of(folder, where) for where in ("off", "all"))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    theirs = resident.state_dict()
    for ours in (model.state_dict(), torch.load(tmp_path / "state.pt")):
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8)) for key in ours if ours[key].dim()
        )
    want = logits(resident)
    copied = copy.deepcopy(model)
    assert not any(in_host(copied).values())
    assert torch.equal(logits(copied), want)
    model.save_pretrained(tmp_path)
    again = read_again(tmp_path)
    assert all(in_host(again).values())
    assert torch.equal(logits(again), want)


# --- the budget ---


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "short", "resident"),
    [pytest.param(2, 0, [], marks=pytest.mark.full), pytest.param(3, 0, [3], marks=pytest.mark.full), (4, 1, [2])],
    ids=["buffers", "one more", "a byte short"],
)
def test_a_budget_is_spread_over_the_layers(folder, gpu, patched, layers, short, resident):
    """The budget counts whole experts modules and the two prefetch buffers. Without buffers, four layers would fit."""
    (size,) = set(sizes_of(model_of(folder, "off")))
    room = 3 * 6 * host_memory.ALIGNMENT  # four linear layers and two stacks
    budget = layers * size - short
    want = train(with_lora(model_of(folder, "off")))
    model = model_of(folder, f"{budget}B")
    inside = [layer for (layer, name), block in in_host(model).items() if block is None and name == STACKS[0]]
    assert inside == resident
    assert same_steps(train(with_lora(model)), want)
    held = counts().resident - len(resident) * size
    assert 2 * size <= held <= 2 * (size + room)  # the buffers
    assert counts().in_host == (LAYERS - len(resident)) * size
    assert list(gpu.pinned.values()) == [size + room] * (LAYERS - len(resident))


@pytest.mark.parametrize(("budget", "every"), [(26, 2), (14, 4), (50 - 2 * 8, 0)])
def test_what_stays_is_spread_evenly(gpu, patched, budget, every):
    """The plan is even over 48 modules of 1 KB each, or with every third of 4 KB."""
    patched.enable(experts="4bit", offload=f"{budget}KB")
    model = torch.nn.Module()
    sizes = [500 if every or layer % 3 else 2000 for layer in range(48)]
    stacks = [(f"layers.{layer}.experts.{name}", "cpu", size) for layer, size in enumerate(sizes) for name in STACKS]
    planning.plan(model, stacks)
    blocks = planning.plans[model]
    stay = [layer for layer in range(48) if (f"layers.{layer}", torch.device("cpu")) not in blocks]
    resident = sum(2 * sizes[layer] for layer in stay)
    assert sum(block.resident for block in blocks.values()) == resident
    if every:
        assert stay == list(range(every - 1, 48, every)) and resident == (budget - 2) * 1000
    else:
        assert 0.9 * (budget - 8) * 1000 < resident <= (budget - 8) * 1000
        gaps = [later - layer for layer, later in zip([-1, *stay], [*stay, 48], strict=True)]
        assert max(gaps) <= 2 * 48 / len(stay)


def test_a_budget_that_holds_all_and_one_that_holds_no_buffers(folder, gpu, patched):
    (size,) = set(sizes_of(model_of(folder, "off")))
    assert not any(in_host(model_of(folder, f"{LAYERS * size}B")).values())
    with pytest.raises(ConfigError, match="too small for the two prefetch buffers"):
        model_of(folder, f"{2 * size - 1}B")
    assert not gpu.pinned


def test_packed_size_is_what_is_packed(folder, gpu, patched):
    for nested in (True, False):
        model = model_of(folder, "off", nested=nested)
        for packed, state in packed_of(model).values():
            assert planning.packed_size(state.shape.numel(), nested) == sum(t.nbytes for t in tensors_of(packed, state))


def test_without_experts_only_linear_layers_move(folder, gpu, patched, caplog):
    patched.enable(experts="off", offload="all")
    model = loaded(folder, quantization_config=in_4bit())
    assert "offload moves only packed weights" in caplog.text
    assert all_in_host(model) and len(packed_of(model)) == 4 * LAYERS and len(gpu.pinned) == LAYERS


@pytest.mark.skipif(torch.cuda.is_available(), reason="loads on the CPU")
def test_on_a_cpu_it_says_that_it_is_ignored(folder, on, caplog):
    """Here, the experts are on a real CPU, which does not stand in for CUDA."""
    nf4_patch.enable(experts="4bit", offload="all")
    model = loaded(folder, quantization_config=in_4bit())
    lines = [record.getMessage() for record in caplog.records if "offload" in record.getMessage()]
    assert len(lines) == 1 and "offload is ignored for weights on the device cpu" in lines[0]
    assert none_in_host(model) and not planning.plans


def test_a_release_that_reserves_memory_in_another_way_is_refused_for_offload_alone(folder, gpu, patched, monkeypatch):
    patched.disable()
    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", lambda model, *_: None)
    patched.enable(experts="4bit", offload="off")
    with pytest.raises(RuntimeError, match=r"cannot replace .*caching_allocator_warmup"):
        model_of(folder)
    assert experts_of(model_of(folder, "off"))


def test_a_tensor_larger_than_planned_stays_on_the_gpu(gpu):
    block = host_memory.HostBlock(200, torch.device("cpu"))
    large = torch.zeros(201, dtype=torch.uint8).random_()
    assert block.placed(large) is large
    small = block.placed(large[:100])
    assert block.part(small) == slice(0, 100) and torch.equal(small, large[:100]) and block.part(small[:50]) is None
    del small, block
    assert not gpu.pinned


# --- memory ---


def test_host_memory_that_cannot_be_pinned(folder, gpu, patched):
    gpu.limit = 150_000
    with pytest.raises(MemoryError, match=r"KiB|MiB|KB.*could not be pinned.*cudaErrorMemoryAllocation"):
        model_of(folder)
    gc.collect()
    assert not gpu.pinned and not host_memory.blocks


def test_more_than_the_host_has(folder, gpu, patched, monkeypatch):
    assert 2**20 < planning.free_memory() < float("inf")
    monkeypatch.setattr(planning, "free_memory", lambda: 2**18)
    with pytest.raises(MemoryError, match=r"6\d\d KiB of host memory are needed, but 256 KiB are free"):
        model_of(folder)
    assert not gpu.pinned
    model_of(folder, f"{sizes_of(model_of(folder, 'off'))[0] * LAYERS}B")


def test_nothing_is_left_after_the_model(folder, gpu, patched):
    model = with_lora(model_of(folder))
    train(model, steps=1)
    assert gpu.pinned and counts().resident
    del model
    gc.collect()
    assert not gpu.pinned and not host_memory.blocks and not planning.plans and counts().resident == 0


def test_a_tensor_of_it_outlives_the_model(folder, gpu, patched):
    model = model_of(folder)
    kept = next(tensor for key, tensor in model.state_dict().items() if key.endswith("experts.down_proj"))
    copied = kept.clone()
    del model
    gc.collect()
    assert len(gpu.pinned) == 1 and torch.equal(kept, copied)


def test_switched_off_it_is_read_where_it_lies(folder, gpu, patched):
    model = model_of(folder)
    want = logits(model)
    assert counts().resident
    patched.enable(offload="off")
    assert not counts().resident
    before = counts().fetches
    assert torch.equal(logits(model), want)
    patched.disable()
    assert torch.equal(logits(model), want) and counts().fetches == before
    assert all(buffer.block is None for each in prefetch.prefetchers.values() for buffer in each.buffers)
    patched.enable(experts="4bit", offload="all")
    assert torch.equal(logits(model), want) and counts().fetches > before


def test_inside_a_capture_nothing_is_fetched(folder, gpu, patched):
    model = model_of(folder)
    want = logits(model)
    before = counts().fetches
    gpu.captured = True
    assert torch.equal(logits(model), want) and counts().fetches == before


# --- with others ---


@pytest.mark.full
def test_a_cached_stack_is_not_fetched(folder, gpu, patched):
    want = train(with_lora(model_of(folder, "off")))
    patched.enable(cache="1GiB")
    model = with_lora(model_of(folder))
    assert same_steps(train(model), want)
    hits, before = cache.hits, counts().fetches
    train(model, steps=1)
    assert cache.hits - hits >= 2 * LAYERS and counts().fetches == before
    patched.enable(cache="off")


@pytest.mark.full
def test_two_models_in_turn_and_in_two_threads(folder, gpu, patched):
    want = logits(model_of(folder, "off"))
    models = [model_of(folder) for _ in range(2)]
    for model in models * 2:
        assert torch.equal(logits(model), want)

    def run(model):
        for _ in range(5):
            assert torch.equal(logits(model), want)

    together(*(functools.partial(run, model) for model in models))


@pytest.mark.every(2)
@pytest.mark.parametrize("where", ["copy", "current_stream"])
def test_an_interrupt_leaves_nothing_wrong(folder, gpu, patched, monkeypatch, where):
    model = with_lora(model_of(folder))
    want = train(copy.deepcopy(model), steps=1)
    original, calls = getattr(gpu, where), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    setattr(gpu, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        [dense(module, name) for module in experts_of(model) for name in STACKS]
    assert len(calls) == 4
    assert same_steps(train(model, steps=1), want)


def test_the_read_after_an_interrupt_is_from_the_buffer(folder, gpu, patched):
    model = model_of(folder)
    modules, want = experts_of(model), [dense(module) for module in experts_of(model)]
    every = prefetch.Buffer, prefetch.Prefetcher
    functions = [each for owner in every for each in vars(owner).values() if hasattr(each, "__code__")]

    def read():
        for module, stack in zip(modules, want, strict=True):
            assert torch.equal(dense(module), stack)

    for _ in interrupted_at_every_line(read, prefetch.Prefetch.read, *functions, before=nf4_patch.release):
        read()
        (prefetcher,) = prefetch.prefetchers.values()
        for buffer in prefetcher.buffers:
            assert all(views[0] is not None for views in buffer.views.values())


def test_what_the_report_says(folder, gpu, patched):
    model = model_of(folder)
    logits(model)
    assert "of packed weights in host memory" in str(nf4_patch.status()) and "fetches" in str(nf4_patch.status())
    assert nf4_patch.status().as_dict()["offload"]["cpu"]["fetches"] == LAYERS


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_knows_the_limit_of_the_container(version, tmp_path):
    def put(name: str, text: object) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    put("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB")
    assert planning.free_memory(tmp_path) == 8000 * 1024
    if version == 2:
        put("proc/self/cgroup", "0::/outer/inner")
        folder, limit, used, stat = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        put(f"{folder}/outer/inner/{limit}", "max")
        put(f"{folder}/outer/inner/{used}", 1000)
        put(f"{folder}/outer/inner/memory.stat", f"{stat} 0")
    else:
        put("proc/self/cgroup", "5:cpu,cpuacct:/outer/inner\n4:memory:/outer/inner")
        folder, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        stat = "total_inactive_file"
    put(f"{folder}/outer/{limit}", 2**20)
    put(f"{folder}/outer/{used}", 2**18)
    put(f"{folder}/outer/memory.stat", f"{stat} 4096")
    assert planning.free_memory(tmp_path) == 2**20 - 2**18 + 4096
    put(f"{folder}/outer/{used}", 2**21)
    assert planning.free_memory(tmp_path) == 0
