"""enable(offload="auto"): which layers spare memory keeps on the GPU, and when it gives them back.

CPU tensors stand in for CUDA, and the free memory is simulated. gpu/test_offload_gpu.py has the cases for a GPU.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from host_memory import Cuda
from offloaded import (
    Training,
    all_in_host,
    counts,
    dense_model,
    load_dense,
    none_in_host,
    packed_of,
    same_steps,
    sizes_of,
    train,
    with_lora_on_all,
)
from tiny_experts import CHECKPOINTING, adapters_of, ids_of, loaded, saved

import nf4_patch
from nf4_patch.activations.layers import activations
from nf4_patch.cache.store import cache
from nf4_patch.memory import spare as memory
from nf4_patch.nf4 import runtime
from nf4_patch.offload import host_memory, planning, prefetch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what plays CUDA")
LAYERS, CPU = 6, -1
MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    saved(dense_model(LAYERS), place)
    return place


class Gpu:
    """A simulated GPU: ``room`` bytes are free without the resident copies, beyond the margin."""

    room, others, retries, margin = 0, GIB, 0, 64 * MIB

    def info(self, device: int) -> memory.MemoryInfo:
        taken = prefetch.taken[device]
        return memory.MemoryInfo(self.room + self.margin - taken, GIB + taken, self.others, self.margin)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    gc.collect()
    monkeypatch.setattr(host_memory, "cuda", Cuda())
    prefetch.prefetchers.clear()
    gpu = Gpu()
    monkeypatch.setattr(memory.MemoryInfo, "of", gpu.info)
    monkeypatch.setattr(memory, "SECONDS", 0)
    for name, found in {
        "devices_in_use": lambda: [CPU], "empty_cache": lambda: None, "allocation_retries": lambda device: gpu.retries,
    }.items():  # fmt: skip
        monkeypatch.setattr(runtime, name, found)
    yield gpu
    nf4_patch.disable()
    gc.collect()
    assert not any(prefetch.taken.values()) and not host_memory.blocks


def model_of(folder: Any, offload: str = "auto", dropout: float = 0.0, **options: Any) -> Any:
    nf4_patch.enable(offload=offload, **{"lora": "fused", **options})  # which reads weights in a forward on a CPU too
    torch.manual_seed(0)
    return with_lora_on_all(load_dense(folder), lora_dropout=dropout)


def block_size(model: Any) -> int:
    """Return the bytes of a layer's block, including the padding that aligns its tensors."""
    (size,) = {block.size for block in host_memory.living()}
    return size


def kept() -> list[int]:
    """Return the layers that have a resident copy, by their number among all layers with a block."""
    (prefetcher,) = prefetch.prefetchers.values()
    held = [reference() for reference, buffer in prefetcher.resident.items() if buffer is not None]
    return [index for index, block in enumerate(host_memory.living()) if block in held]


def logits(model: Any, tokens: int = 24) -> torch.Tensor:
    """Return the logits, computed with gradients, because bitsandbytes itself reads the weight for few rows without gradients."""
    found: torch.Tensor = model.train()(input_ids=ids_of(tokens)).logits
    return found.detach()


# --- which layers stay ---


@pytest.mark.parametrize(
    ("layers", "which"), [(0, []), (1, [5]), (2, [2, 5]), (3, [1, 3, 5]), (6, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])]
)  # fmt: skip
def test_what_is_spare_after_two_steps_holds_layers(folder, patched, gpu, layers, which):
    model = model_of(folder)
    size = block_size(model)
    gpu.room = layers * size
    training = Training(model)
    training.steps(2)
    (prefetcher,) = prefetch.prefetchers.values()
    buffers = sum(buffer.memory.nbytes for buffer in prefetcher.buffers)
    assert kept() == [] and counts().resident == buffers == 2 * size
    training.steps(1)
    assert kept() == which and prefetch.taken[CPU] == len(which) * size
    found = counts()
    assert (found.kept, found.layers) == (len(which), LAYERS) and found.resident == buffers + len(which) * size
    assert all_in_host(model) and found.in_host == sum(sizes_of(model))
    assert f"; {len(which)} of {LAYERS} layers stay on the GPU" in str(nf4_patch.status())
    assert found.waits == ("" if layers else "MARGIN")
    training.steps(3)
    late = counts().late
    host_memory.cuda.copies.clear()
    training.steps(2)
    starts = {block.host.data_ptr(): index for index, block in enumerate(host_memory.living())}
    copied = {starts[address] for address in host_memory.cuda.copies}
    rest = set(range(LAYERS)) - set(which)
    assert copied <= rest and bool(copied) == (len(rest) > 2)  # two layers stay in the prefetch buffers
    assert counts().late == late  # what is not resident arrives ahead


@pytest.mark.parametrize(
    ("way", "options"),
    [("recomputed", {"lora": "off"}), ("reentrant", {}), ("kept", {"matmul": "auto"}), ("recomputed", {"activations": "auto"}),
     ("recomputed", {"cache": "auto"})],
    ids=str,
)  # fmt: skip
def test_steps_are_those_of_the_resident_model(folder, patched, gpu, way, options):
    found = []
    for offload in ("off", "auto"):
        model = model_of(folder, offload, 0.1, **options)
        gpu.room = 0 if offload == "off" else 3 * block_size(model)
        found.append(train(model, 6, CHECKPOINTING[way]))
    assert all_in_host(model) and len(kept()) == 3 and counts().fetches
    assert same_steps(*found) and found[0][0][0] != found[0][0][-1]


def test_layers_come_before_activations_and_the_cache(folder, patched, gpu):
    model = model_of(folder, activations="auto", cache="auto")
    size = block_size(model)
    for room, shares in ((3 * size, (3 * size, 0)), (6 * size + 1000, (6 * size, 1000))):
        gpu.room = room
        memory.spare.give_back(memory.Waits.TRAINING)
        Training(model).steps(3)
        assert [user.rank for user in memory.spare.users] == [-1, 0, 1]
        assert (prefetch.user.share, activations.user.share + cache.user.share) == shares
        assert prefetch.taken[CPU] == shares[0]


def test_status_says_that_nothing_was_prefetched(folder, patched, gpu):
    training, said = Training(model_of(folder, "all")), []
    for _ in range(2):
        said.append("nothing was prefetched" in str(nf4_patch.status()))
        training.steps(1)
    assert said == [True, False] and counts().fetches


def test_what_layers_do_not_want_goes_to_activations(folder, patched, gpu, monkeypatch):
    model = model_of(folder, activations="auto")
    monkeypatch.setattr(activations.user, "wants", lambda rest: 1000)
    gpu.room = 9 * block_size(model)
    training = Training(model)
    training.steps(3)
    assert (prefetch.user.share, activations.budget) == (6 * block_size(model), 3 * block_size(model))


def test_a_model_that_was_loaded_with_a_size(folder, patched, gpu):
    size = sizes_of(model_of(folder, "off"))[0]
    model = model_of(folder, f"{4 * size}B")
    nf4_patch.enable(offload="auto", lora="fused")
    gpu.room = GIB
    training = Training(model)
    training.steps(3)
    assert (counts().kept, counts().layers) == (4, 4) and counts().resident >= 6 * size


# --- giving layers back ---


def larger(gpu: Gpu, training: Training) -> None:
    training.steps(1, tokens=48)


def another_process(gpu: Gpu, training: Training) -> None:
    gpu.others += GIB
    training.steps()
    gpu.others -= GIB


def short(gpu: Gpu, training: Training) -> None:
    before, gpu.room = gpu.room, -gpu.margin
    training.steps()
    gpu.room = before


def retried(gpu: Gpu, training: Training) -> None:
    gpu.retries += 1
    training.steps()


def another_optimizer(gpu: Gpu, training: Training) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    training.steps()


def released(gpu: Gpu, training: Training) -> None:
    nf4_patch.release()


def evaluated(gpu: Gpu, training: Training) -> None:
    logits(training.model, 60)


@pytest.mark.parametrize(
    ("change", "why"),
    [(larger, "BATCH"), (another_process, "OTHER_PROCESS"), (short, "MEMORY"), (retried, "MEMORY"),
     (another_optimizer, "OPTIMIZER"), (released, ""), (evaluated, "BATCH")],
)  # fmt: skip
def test_layers_are_given_back_and_taken_again(folder, patched, gpu, change, why):
    found = []
    for offload in ("off", "auto"):
        model = model_of(folder, offload)
        gpu.room = 3 * block_size(model) if offload == "auto" else 0
        training = Training(model)
        training.steps(4)
        if offload == "auto":
            assert kept() == [1, 3, 5]
        change(gpu, training)
        if offload == "auto":
            assert kept() == [] and not any(prefetch.taken.values()) and counts().waits == why
            assert counts().kept == 0 and (not why or "until two more training steps: " in str(nf4_patch.status()))
        training.steps(4)
        found.append(torch.stack(training.losses))
    assert kept() == [1, 3, 5] or why == "MEMORY"
    assert torch.equal(*found)


def test_a_larger_batch_finds_no_resident_copy_in_its_first_layer(folder, patched, gpu, monkeypatch):
    model = model_of(folder)
    gpu.room = GIB
    training = Training(model)
    training.steps(4)
    assert kept() == list(range(LAYERS))
    seen: list[int] = []
    model.get_base_model().model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(prefetch.taken[CPU]))
    training.steps(1, tokens=48)
    training.steps(1, tokens=24)
    assert seen == [0, 0]


def test_host_memory_is_freed_with_the_model_while_its_weights_are_cached(folder, patched, gpu):
    """The memory is freed before anything else reads the cache, because the next model may need it."""
    model = model_of(folder, cache="1GiB")
    train(model, 3)
    assert cache.hits and host_memory.blocks
    del model
    gc.collect()
    assert not host_memory.blocks


@pytest.mark.parametrize("offload", ["all", "off"])
def test_switched_to_another_value(folder, patched, gpu, offload):
    model = model_of(folder)
    gpu.room = GIB
    training = Training(model)
    training.steps(3)
    want = logits(model)
    assert prefetch.taken[CPU]
    nf4_patch.enable(offload=offload, lora="fused")
    assert not prefetch.taken[CPU] and prefetch.user not in memory.spare.users
    assert torch.equal(logits(model), want) and counts().layers == counts().kept == 0


def test_out_of_memory_gives_layers_back(folder, patched, gpu, monkeypatch):
    """The copy of a further layer, or the code that reads a copy, runs out of memory.

    If no layer can be given back, the error is raised.
    """
    model = model_of(folder)
    gpu.room = 3 * block_size(model)
    training = Training(model)
    training.steps(4)
    want, original, errors = logits(model, 12), prefetch.Buffer.copy_of, [2]

    def copy_of(*arguments: Any) -> Any:
        if errors[0]:
            errors[0] -= 1
            raise torch.OutOfMemoryError("simulated")
        return original(*arguments)

    monkeypatch.setattr(prefetch.Buffer, "copy_of", copy_of)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        logits(model, 12)
    assert not prefetch.taken[CPU] and counts().waits == "OUT_OF_MEMORY"
    assert torch.equal(logits(model, 12), want)
    training = Training(model)
    training.steps(4)
    assert prefetch.taken[CPU]
    want, errors[0] = logits(model, 12), 1
    assert torch.equal(logits(model, 12), want) and not prefetch.taken[CPU]


def test_no_room_for_the_copy_of_a_further_layer(folder, patched, gpu, monkeypatch):
    model, other = model_of(folder), model_of(folder, "off")
    nf4_patch.enable(offload="auto", lora="fused")
    gpu.room = 3 * block_size(model)
    original, failed = prefetch.Prefetcher.keep, []

    def keep(self: Any, *arguments: Any) -> None:
        if len(failed) < 2 and prefetch.taken[CPU]:
            failed.append(prefetch.taken[CPU])
            raise torch.OutOfMemoryError("simulated")
        original(self, *arguments)

    monkeypatch.setattr(prefetch.Prefetcher, "keep", keep)
    ours, theirs = Training(model), Training(other)
    ours.steps(10)
    assert failed == [block_size(model)] * 2 and len(kept()) == 3
    theirs.steps(10)
    assert torch.equal(torch.stack(ours.losses), torch.stack(theirs.losses))


# --- writes, models, captures ---


def test_a_write_is_seen(folder, patched, gpu):
    model, resident = model_of(folder), model_of(folder, "off")
    nf4_patch.enable(offload="auto", lora="fused")
    gpu.room = GIB
    training = Training(model)
    training.steps(3)
    for parameter, trained in zip(adapters_of(resident).values(), adapters_of(model).values(), strict=True):
        parameter.data.copy_(trained.data)
    assert kept() == list(range(LAYERS)) and torch.equal(logits(model), logits(resident))
    before = logits(model)
    for number, through in enumerate((lambda p: p, lambda p: p.data)):
        for each in (model, resident):
            packed, _ = packed_of(each)["base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight"]
            with torch.no_grad():
                through(packed).copy_(packed.flip(0))
        if number:  # a write through ``data`` raises no version counter
            nf4_patch.release()
        assert torch.equal(logits(model), logits(resident)) and torch.equal(logits(model), before) == bool(number)


def test_merged_layers(folder, patched, gpu):
    model, resident = model_of(folder), model_of(folder, "off")
    nf4_patch.enable(offload="auto", lora="fused")
    gpu.room = GIB
    training = Training(model)
    training.steps(3)
    for parameter, trained in zip(adapters_of(resident).values(), adapters_of(model).values(), strict=True):
        parameter.data.copy_(trained.data)
    for change in ("merge_adapter", "unmerge_adapter"):
        for each in (model, resident):
            getattr(each, change)()
        assert torch.equal(logits(model), logits(resident)) and all_in_host(model)


def test_two_models(folder, patched, gpu):
    """A model that is loaded takes the memory of another model's copies. When a model is deleted, only its copies are freed."""
    gpu.room = GIB
    first = model_of(folder)
    one = Training(first)
    one.steps(3)
    size = prefetch.taken[CPU]
    assert size == LAYERS * block_size(first)
    second = model_of(folder)
    assert not prefetch.taken[CPU] and counts().waits == "MODEL"
    one.steps(3)
    assert prefetch.taken[CPU] == size  # the second one is idle
    Training(second).steps(1)
    assert not prefetch.taken[CPU] and counts().waits == "OPTIMIZER"
    for _ in range(3):
        logits(second)
        one.steps(1)
    assert prefetch.taken[CPU] == 2 * size and counts().kept == 2 * LAYERS
    want = logits(second)
    del one, first
    gc.collect()
    assert prefetch.taken[CPU] == size and counts().kept == LAYERS and torch.equal(logits(second), want)
    del second
    gc.collect()
    assert not prefetch.taken[CPU] and not host_memory.blocks


def test_a_model_in_16_bits_is_loaded(folder, patched, gpu):
    gpu.room = GIB
    training = Training(model_of(folder))
    training.steps(3)
    assert prefetch.taken[CPU]
    loaded(folder)
    assert not prefetch.taken[CPU] and counts().waits == "MODEL"
    training.steps(3)
    assert len(kept()) == LAYERS


def test_while_a_graph_is_captured_the_copies_stay(folder, patched, gpu, monkeypatch):
    """Freeing a copy makes the copy stream wait. This must not become a part of the graph."""
    model = model_of(folder)
    gpu.room = GIB
    training = Training(model)
    training.steps(3)
    held = prefetch.taken[CPU]
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "is_capturing", lambda: True)
        memory.spare.give_back(memory.Waits.OPTIMIZER)
    assert prefetch.taken[CPU] == held > 0
    training.steps(4)
    assert prefetch.taken[CPU] == held and counts().waits == ""


def test_a_model_moved_away_frees_its_copies(folder, patched, gpu):
    model = model_of(folder)
    gpu.room = GIB
    training = Training(model)
    training.steps(3)
    before, want = LAYERS * block_size(model), logits(model)
    assert prefetch.taken[CPU] == before
    layer = model.get_base_model().model.layers[2]
    for module in layer.modules():
        if hasattr(module, "base_layer") and hasattr(module.base_layer.weight, "quant_state"):
            weight = module.base_layer.weight
            weight.data = weight.data.clone()
            weight.quant_state.absmax = weight.quant_state.absmax.clone()
            if weight.quant_state.nested:
                weight.quant_state.state2.absmax = weight.quant_state.state2.absmax.clone()
    gc.collect()
    assert prefetch.taken[CPU] == before * (LAYERS - 1) // LAYERS and torch.equal(logits(model), want)


def test_the_size_of_a_batch_is_observed_without_another_option(folder, patched, gpu):
    Training(model_of(folder)).steps(2)
    assert {length for *_, length in memory.spare.sizes} == {24} and memory.spare.users == [prefetch.user]


@pytest.mark.parametrize(
    ("sizes", "budget", "stays"),
    [([1, 1, 1, 1], 2, "0101"), ([1, 1, 1, 1], 9, "1111"), ([3, 1, 1, 1], 2, "0101"), ([5, 5], 4, "00"), ([], 3, "")],
)
def test_layers_are_spread(sizes, budget, stays):
    found = planning.spread(sizes, budget)
    assert found == [each == "1" for each in stays]
    assert sum(size for size, stay in zip(sizes, found, strict=True) if stay) <= budget


def test_without_spare_memory_nothing_differs_from_all(folder, patched, gpu):
    found = []
    for offload in ("all", "auto"):
        prefetch.prefetchers.clear()
        model = model_of(folder, offload)
        Training(model).steps(4)
        found.append((counts().fetches, counts().late, counts().resident, counts().in_host))
        assert all_in_host(model) and not none_in_host(model)
        del model
        gc.collect()
    assert found[0] == found[1]
