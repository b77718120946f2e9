"""enable(offload=...) of dense models: every packed weight of a decoder layer, loaded, trained, read and refused.

CPU tensors stand in for CUDA. gpu/test_offload_gpu.py has the cases for a GPU.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.core_model_loading as library
from host_memory import Cuda
from offloaded import (
    all_in_host,
    counts,
    dense_model,
    load_dense,
    none_in_host,
    packed_of,
    same_steps,
    sizes_of,
    tensors_of,
    train,
    with_lora_on_all,
)
from threads import together
from tiny_experts import CHECKPOINTING, ids_of, saved
from unsloth_releases import RELEASES, with_unsloth

import nf4_patch
from nf4_patch.cache.store import cache
from nf4_patch.matmul.product import FusedMatmul
from nf4_patch.offload import host_memory, planning, prefetch
from nf4_patch.patching import dequantizer
from nf4_patch.patching.config import ConfigError
from nf4_patch.patching.reasons import Reason

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what plays CUDA")
LAYERS, LINEAR = 4, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    saved(dense_model(LAYERS), place)
    return place


@pytest.fixture(scope="module")
def packed_folder(folder, tmp_path_factory):
    """Return the folder of the same model, saved in 4 bits, with packed bytes stored as bf16."""
    place = tmp_path_factory.mktemp("packed")
    load_dense(folder, bnb_4bit_quant_storage=torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    gc.collect()
    monkeypatch.setattr(host_memory, "cuda", Cuda())
    prefetch.prefetchers.clear()
    yield host_memory.cuda
    nf4_patch.disable()
    gc.collect()


def model_of(folder: Any, offload: str = "all", enable: Any = None, **options: Any) -> Any:
    nf4_patch.enable(offload=offload, **enable or {})
    return load_dense(folder, **options)


def bytes_of(model: Any) -> list[torch.Tensor]:
    return [
        tensor.detach().reshape(-1).view(torch.uint8).clone()
        for each in packed_of(model).values()
        for tensor in tensors_of(*each)
    ]


def same_bytes(model: Any, other: Any) -> bool:
    ours, theirs = bytes_of(model), bytes_of(other)
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.train()(input_ids=ids_of()).logits
        return found


# --- loading ---


@pytest.mark.every(2)
@pytest.mark.parametrize("source", ["folder", "packed_folder"])
@pytest.mark.parametrize("nested", [True, False])
def test_each_weight_leaves_before_the_next_comes(request, gpu, patched, monkeypatch, source, nested):
    """transformers reads the next weight, in the same thread, only after the previous weight is in host memory."""
    folder = request.getfixturevalue(source)
    resident = model_of(folder, "off", nested=nested)
    seen, original = [], library.spawn_materialize

    def spawn(pool: Any, tensor: Any, *rest: Any, **options: Any) -> Any:
        assert pool is None
        job = original(pool, tensor, *rest, **options)

        def read() -> Any:
            (model,) = planning.plans
            state = [vars(m.weight)["quant_state"] for m in model.modules() if type(m).__name__ == "Linear4bit"]
            seen.append(sum(each is not None for each in state))
            assert all(each is None or each.absmax.data_ptr() in host_memory.blocks for each in state)
            return job()

        return read

    monkeypatch.setattr(library, "spawn_materialize", spawn)
    before = dict(os.environ)
    model = model_of(folder, nested=nested)
    assert max(seen) >= LAYERS * LINEAR - 1
    assert all_in_host(model) and len(packed_of(model)) == LAYERS * LINEAR and same_bytes(model, resident)
    assert dict(os.environ) == before and not planning.plans
    assert len(gpu.pinned) == LAYERS and counts().in_host == sum(sizes_of(model))


def test_what_is_outside_of_layers_stays(folder, patched):
    model = model_of(folder, llm_int8_skip_modules=["embed_tokens"])
    assert type(model.lm_head).__name__ == "Linear4bit"
    assert model.lm_head.weight.data_ptr() not in host_memory.blocks and all_in_host(model)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("model.layers.12.mlp.experts.7.down_proj.weight", "model.layers.12"),
        ("model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0"),
        ("lm_head.weight", ""),
        ("model.embed_tokens.weight", ""),
        ("0.weight", "0"),
    ],
)
def test_the_layer_of_a_weight(name, layer):
    assert planning.layer_of(name) == layer


def test_without_the_option_nothing_is_different(folder, gpu, patched, monkeypatch):
    pools = []
    original = library.spawn_materialize
    monkeypatch.setattr(
        library,
        "spawn_materialize",
        lambda pool, *rest, **options: pools.append(pool) or original(pool, *rest, **options),
    )
    model = model_of(folder, "off")
    assert none_in_host(model) and not gpu.pinned and not planning.plans
    assert not dequantizer.prefetch.on and pools == [None] * len(pools)  # transformers packs in order itself
    model.save_pretrained(folder / "again")
    load_dense(folder / "again")
    assert pools[-1] is not None


# --- steps ---

OPTIONS: dict[str, dict[str, str]] = {
    "plain": {}, "lora": {"lora": "fused"}, "matmul": {"lora": "fused", "matmul": "auto"}, "fast": {"profile": "fast", "graphs": "off"},
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("recomputed", "plain"), ("reentrant", "lora"), ("recomputed", "lora"), ("kept", "fast"),
        pytest.param("kept", "plain", marks=pytest.mark.full), pytest.param("kept", "matmul", marks=pytest.mark.full),
        pytest.param("recomputed", "fast", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_steps_are_those_of_the_resident_model(folder, gpu, patched, way, options):
    enable = dict(OPTIONS[options])
    profile = [enable.pop("profile")] if "profile" in enable else []
    found = []
    for offload in ("off", "all"):
        nf4_patch.enable(*profile, offload=offload, **enable)
        torch.manual_seed(0)
        model = with_lora_on_all(load_dense(folder), lora_dropout=0.1)
        found.append(train(model, checkpointing=CHECKPOINTING[way]))
        assert (all_in_host if offload == "all" else none_in_host)(model)
    assert same_steps(*found) and found[0][0][0] != found[0][0][-1]
    before = counts()
    assert 0 < before.late < 2 * LAYERS and before.fetches >= 2 * (LAYERS - 2)
    gpu.copies.clear()
    train(model, steps=1)
    assert counts().late == before.late  # every layer arrives ahead
    blocks = Counter(gpu.copies)
    assert max(blocks.values()) <= 2 and len(blocks) <= LAYERS  # no weight is copied by itself


@pytest.mark.full
def test_a_size_is_spread_over_the_layers(folder, gpu, patched):
    (size,) = set(sizes_of(model_of(folder, "off")))
    want = train(with_lora_on_all(load_dense(folder)))
    model = model_of(folder, f"{3 * size}B")
    layers = {
        planning.layer_of(name) for name, each in packed_of(model).items() if each[0].data_ptr() in host_memory.blocks
    }
    assert len(layers) == LAYERS - 1 == len(gpu.pinned)
    assert same_steps(train(with_lora_on_all(model)), want)
    room = 3 * LINEAR * host_memory.ALIGNMENT
    assert 3 * size <= counts().resident <= 3 * size + 2 * room and counts().in_host == (LAYERS - 1) * size
    assert none_in_host(model_of(folder, f"{LAYERS * size}B"))


def test_a_weight_is_copied_again_only_after_a_write(folder, gpu, patched):
    """Each read gets the current bytes, also of a view, and after another parameter wrote into the same memory."""
    model = model_of(folder)
    weights = list(packed_of(model).values())[:LINEAR]

    def read(packed: Any, state: Any) -> torch.Tensor:
        found: torch.Tensor = nf4_patch_dequantize(packed, state)
        return found

    def right(packed: Any, state: Any) -> torch.Tensor:
        with torch.no_grad():
            plain = torch.Tensor(packed.data.clone())
            moved = copy.copy(state)
            moved.absmax = state.absmax.clone()
            found: torch.Tensor = nf4_patch_dequantize(plain, moved)
            return found

    for _ in range(2):
        for packed, state in weights:
            assert torch.equal(read(packed, state), right(packed, state))
    assert counts().fetches == 1 and len(gpu.copies) == 1 + 3 * (LINEAR - 1)  # each weight once more at its first read
    gpu.copies.clear()
    packed, state = weights[2]
    assert torch.equal(read(packed.t(), state), right(packed, state).t()) and not gpu.copies
    for change in (lambda: packed.copy_(packed.flip(0)), lambda: state.absmax.copy_(state.absmax.flip(0))):
        with torch.no_grad():
            change()
        assert torch.equal(read(packed, state), right(packed, state))
    assert len(gpu.copies) == 2 * 3
    other = type(packed)(packed.data, quant_state=state, bnb_quantized=True)
    for each in (other, packed):
        with torch.no_grad():
            each.copy_(each.flip(0))
        assert torch.equal(read(each, state), right(each, state))
    assert torch.equal(read(other, state), right(other, state))
    alias = packed.data  # its version counter does not see what is written into the parameter
    for _ in range(2):
        assert torch.equal(read(alias, state), right(alias, state))
        with torch.no_grad():
            packed.copy_(packed.roll(1, 0))


def nf4_patch_dequantize(packed: Any, state: Any) -> torch.Tensor:
    import bitsandbytes.functional

    found: torch.Tensor = bitsandbytes.functional.dequantize_4bit(packed, state)
    return found


def test_a_fused_matmul_reads_the_buffer(folder, gpu, patched, monkeypatch):
    """Check the kernel's weight before its launch. gpu/test_offload_gpu.py compares the products."""
    seen = []
    monkeypatch.setattr(FusedMatmul, "resolve", lambda _, x, weight, *rest: seen.append(weight) or Reason.NOT_FASTER)
    packed, state = next(iter(packed_of(model_of(folder)).values()))
    x = torch.ones(1, state.shape[1], dtype=state.dtype)
    assert FusedMatmul("test").of_state(x, packed, state) is Reason.NOT_FASTER
    (weight,) = seen
    assert not any(tensor.data_ptr() in host_memory.blocks for tensor in weight.tensors())
    assert torch.equal(weight.packed, packed.data) and torch.equal(weight.absmax, state.absmax)
    assert counts().fetches == 1


# --- readers ---


def test_readers(folder, patched, tmp_path):
    resident, model = (model_of(folder, where) for where in ("off", "all"))
    assert torch.equal(logits(model), logits(resident))
    found = [
        each.generate(ids_of(6), max_new_tokens=4, do_sample=False, use_cache=True).tolist()
        for each in (resident, model)
    ]
    assert found[0] == found[1]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    ours, theirs = torch.load(tmp_path / "state.pt"), resident.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8)) for key in ours if ours[key].dim()
    )
    copied = copy.deepcopy(model)
    assert none_in_host(copied) and same_bytes(copied, resident)
    model.save_pretrained(tmp_path / "model")
    again = load_dense(tmp_path / "model")
    assert all_in_host(again) and same_bytes(again, resident)
    dense = [each.dequantize().model.layers[1].mlp.up_proj.weight for each in (resident, again)]
    assert torch.equal(*dense)


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [{}, {"merge": "reversible"}])
def test_merged_layers_stay_in_host_memory(folder, patched, options):
    found = []
    for offload in ("off", "all"):
        model = with_lora_on_all(model_of(folder, offload, enable=options))
        parts = [bytes_of(model)]
        for change in (model.merge_adapter, model.unmerge_adapter):
            change()
            parts.append(bytes_of(model))
            assert (all_in_host if offload == "all" else none_in_host)(model)
        merged = model.merge_and_unload()
        assert (all_in_host if offload == "all" else none_in_host)(merged)
        parts.append(bytes_of(merged))
        found.append(parts)
    for ours, theirs in zip(*found, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, found[1][0], found[1][1]))


@pytest.mark.full
def test_prepared_for_training_and_cached(folder, patched):
    from peft import prepare_model_for_kbit_training

    found = []
    for offload in ("off", "all"):
        model = model_of(folder, offload, enable={"cache": "1GiB"})
        model = with_lora_on_all(prepare_model_for_kbit_training(model))
        found.append(train(model))
    assert all_in_host(model) and same_steps(*found)
    hits, fetches = cache.hits, counts().fetches
    train(model, steps=1)
    assert cache.hits > hits and counts().fetches == fetches


def test_two_models_and_the_next_one(folder, gpu, patched):
    first, second = model_of(folder), model_of(folder)
    want = logits(first)
    assert torch.equal(logits(second), want) and len(gpu.pinned) == 2 * LAYERS
    del first
    gc.collect()
    assert len(gpu.pinned) == LAYERS and torch.equal(logits(second), want)
    del second
    gc.collect()
    assert not gpu.pinned and not host_memory.blocks
    assert torch.equal(logits(model_of(folder)), want)


@pytest.mark.full
@RELEASES
def test_unsloth(release, tmp_path):
    """patching/test_own_kernel.py has the choice between Unsloth's kernel and the prefetch."""
    said = with_unsloth(release, tmp_path, "offload_unsloth", tmp_path / "model").split("\n")
    parts = ["steps", "auto", "own kernel", *["compiled"] * (release == "2026.10.9")]
    assert [line for line in said if line in (*parts, "compiled")] == parts


# --- bad input ---


@pytest.fixture
def unread(monkeypatch):
    """Fail the test if a weight is read from the checkpoint."""
    monkeypatch.setattr(library, "_materialize_copy", lambda *_, **__: pytest.fail("a weight was read"))


def test_a_size_for_less_than_two_layers(folder, gpu, patched, unread):
    with pytest.raises(ConfigError, match=r'hold the packed weights of one layer each. Give "1MiB" or more'):
        model_of(folder, "30KB")
    assert not gpu.pinned and not planning.plans


def test_host_memory_that_is_not_there(folder, gpu, patched, unread, monkeypatch):
    monkeypatch.setattr(planning, "free_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"KiB of host memory are needed, but 1 KB are free"):
        model_of(folder)
    assert not gpu.pinned


def test_host_memory_that_cannot_be_pinned(folder, gpu, patched, unread):
    gpu.limit = 50_000
    with pytest.raises(
        MemoryError, match=r"could not be pinned for packed weights: cudaErrorMemoryAllocation.* pinned already"
    ):
        model_of(folder)
    gc.collect()
    assert not gpu.pinned and not host_memory.blocks


def test_two_models_are_loaded_in_two_threads(folder, gpu, patched, monkeypatch):
    """transformers reads both in order, and the environment is as before."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    nf4_patch.enable(offload="all")
    before, original, seen = dict(os.environ), library.set_param_for_module, []

    def put(*arguments: Any) -> None:
        begun.set()
        seen.append(os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"))
        time.sleep(0.01)  # so that the other thread runs
        original(*arguments)

    def load() -> None:
        models.append(load_dense(folder))

    monkeypatch.setattr(library, "set_param_for_module", put)
    begun, models = threading.Event(), list[Any]()
    together(load, lambda: begun.wait() and load())
    assert {*seen} == {"1"} and dict(os.environ) == before and all(map(all_in_host, models))


def test_an_interrupt_while_loading(folder, gpu, patched, monkeypatch):
    """The memory that the traceback keeps is freed with it, and the next model loads."""
    original, calls = library.set_param_for_module, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        original(*arguments)

    before = dict(os.environ)
    with monkeypatch.context() as patch:
        nf4_patch.enable(offload="all")
        patch.setattr(library, "set_param_for_module", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_dense(folder)
    gc.collect()
    assert not planning.plans and not gpu.pinned and dict(os.environ) == before
    assert all_in_host(model_of(folder))


def test_an_interrupt_while_host_memory_is_pinned(folder, gpu, patched, monkeypatch):
    """An interrupt during a long call of CUDA is raised when the call returns."""
    register = gpu.register

    def interrupted(*arguments: Any) -> str:
        register(*arguments)
        if len(gpu.pinned) == 2:
            raise KeyboardInterrupt
        return ""

    nf4_patch.enable(offload="all")
    monkeypatch.setattr(gpu, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_dense(folder)
    gc.collect()
    assert not gpu.pinned and not host_memory.blocks


@pytest.mark.parametrize("interrupted", ["synchronize", "cudaHostUnregister"])
def test_an_interrupt_while_host_memory_is_unpinned(monkeypatch, interrupted):
    """The memory is unpinned at the next call."""
    cuda, pinned, raised = host_memory.Cuda(), [], []
    monkeypatch.setattr(cuda, "pending", type(cuda.pending)())

    def act(name: str, argument: Any) -> int:
        if name == "cudaHostUnregister" and argument in pinned:
            pinned.remove(argument)
        if name == interrupted and not raised:
            raised.append(name)
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(torch.cuda, "synchronize", functools.partial(act, "synchronize"))
    cudart = SimpleNamespace(cudaHostUnregister=functools.partial(act, "cudaHostUnregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    first, second = (torch.zeros(2, dtype=torch.uint8) for _ in range(2))
    pinned += [first.data_ptr(), second.data_ptr()]
    with pytest.raises(KeyboardInterrupt):
        cuda.unregister(first, torch.device("cuda", 0))
    cuda.unregister(second, torch.device("cuda", 0))
    assert not pinned and not cuda.pending


def test_a_release_that_sets_weights_in_another_way(folder, gpu, patched, monkeypatch):
    nf4_patch.disable()
    monkeypatch.setattr(library, "set_param_for_module", lambda model, *_: None)
    nf4_patch.enable(offload="all")
    with pytest.raises(RuntimeError, match=r"offload cannot replace .*set_param_for_module"):
        load_dense(folder)
