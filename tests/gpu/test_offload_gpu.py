"""Packed weights in host memory on a GPU have the bits of the resident model at every size.

Other tests cover what only a GPU shows: streams, captured graphs, pinned memory and its release, and the peak while
loading.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from pathlib import Path

import pytest
import torch
from offloaded import (
    Training,
    all_in_host,
    counts,
    dense,
    dense_model,
    in_host,
    load_dense,
    logits,
    model_of,
    none_in_host,
    packed_of,
    same_steps,
    sizes_of,
    tensors_of,
    train,
    with_lora_on_all,
)
from run_example import TORCHRUN, run
from threads import together
from tiny_experts import CHECKPOINTING, STACKS, experts_of, random_model, saved, with_lora

import nf4_patch
from nf4_patch.memory import spare as memory
from nf4_patch.offload import host_memory, prefetch

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]
SUPPORT, PROGRAM = TESTS / "support", TESTS / "programs" / "offload_distributed.py"
STEPS = 10
# name: (changes of the configuration, tokens of a sequence)
SIZES = {
    "tiny": ({"num_hidden_layers": 4}, 24),
    "medium": (
        {"num_hidden_layers": 6, "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 4},
        512,
    ),
    # a layer's experts as Qwen3-30B-A3B has them: 317 MB packed, whose copy takes as long as what computes
    "real": (
        {"num_hidden_layers": 4, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        1024,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    places = {}
    for name, (changes, _) in SIZES.items():
        places[name] = tmp_path_factory.mktemp(name)
        with torch.device("cuda"):
            saved(random_model("qwen3", device="cuda", **changes), places[name])
    return places


@pytest.fixture(autouse=True)
def nothing_is_left(patched):
    gc.collect()
    prefetch.prefetchers.clear()
    yield
    gc.collect()
    assert not host_memory.blocks and not any(each.resident for each in nf4_patch.status().offload.values())


def adapted(folder, where):
    return with_lora(model_of(folder, where))


# --- steps ---


@pytest.mark.parametrize("way", CHECKPOINTING)
@pytest.mark.parametrize("name", SIZES)
def test_steps_are_those_of_the_resident_model(folders, name, way):
    folder, tokens = folders[name], SIZES[name][1]

    def steps(model):
        started = time.perf_counter()
        found = train(model, STEPS, CHECKPOINTING[way], tokens)
        torch.cuda.synchronize()
        print(
            f"\n{name}, {way}: {1e3 * (time.perf_counter() - started) / STEPS:.1f} ms a step, {nf4_patch.status().offload}"
        )
        return found

    model = adapted(folder, "off")
    (size,) = set(sizes_of(model))
    want = steps(model)
    del model
    again = steps(adapted(folder, "off"))
    assert same_steps(again, want), "it does not repeat without offload either"
    assert want[0].isfinite().all() and want[0][0] != want[0][-1]
    layers = SIZES[name][0]["num_hidden_layers"]
    for where in ("all", f"{3 * size}B"):
        model = adapted(folder, where)
        found = [block is not None for block in in_host(model).values()]
        assert sum(found) == 2 * (layers - (where != "all"))
        assert same_steps(steps(model), want), where
        known = counts()
        assert STEPS * 2 * (layers - 3) <= known.fetches
        model.gradient_checkpointing_disable()
        train(model, steps=1, tokens=tokens)
        assert counts().late <= known.late + 2  # of the turn from one way to the other
        del model
        gc.collect()


def test_in_any_order_and_written_in_between(folders):
    """Compare with bitsandbytes' own decoding of the current bytes over the bus."""
    model = model_of(folders["medium"])
    experts = experts_of(model)
    generator = torch.Generator().manual_seed(0)
    for index in torch.randint(0, len(experts), (200,), generator=generator).tolist():
        module = experts[index]
        name = STACKS[index % 2]
        original = module.parametrizations[name].original
        with torch.no_grad():
            if index % 3 == 0:
                original.copy_(original.roll(1, 0))
            assert torch.equal(dense(module, name), getattr(module, name))
            if index % 4 == 0:
                original.bitwise_xor_(0x11)
    assert counts().fetches > counts().late > 0


def test_on_other_streams(folders):
    """A fetch for another stream does not overwrite the weight that is decoded on this stream."""
    model, resident = model_of(folders["medium"]), model_of(folders["medium"], "off")
    wanted = [dense(module) for module in experts_of(resident)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for turn in range(5):
        for index, module in enumerate(experts_of(model)):
            with torch.cuda.stream(streams[(index + turn) % 3]):
                torch.cuda._sleep(1_000_000)
                found.append((index, dense(module)))
    torch.cuda.synchronize()
    for index, stack in found:
        assert torch.equal(stack, wanted[index]), index


def test_two_models_in_two_threads(folders):
    """Each thread has its own stream.

    Compare decoded weights, because cuBLAS may choose another product while a second stream is active.
    """
    wanted = [dense(module) for module in experts_of(model_of(folders["medium"], "off"))]
    models = [model_of(folders["medium"]) for _ in range(2)]

    def passes(model):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for layer in (*range(6), *reversed(range(6))):
                    assert torch.equal(dense(experts_of(model)[layer]), wanted[layer])

    torch.cuda.synchronize()
    together(*(functools.partial(passes, model) for model in models))


# --- what is done to a model ---


def test_moved(folders):
    """A weight that is moved to the CPU and back is in GPU memory."""
    want = logits(model_of(folders["tiny"], "off"))
    moved = model_of(folders["tiny"]).cpu().cuda()
    assert not any(in_host(moved).values())
    assert torch.equal(logits(moved), want)


def test_a_captured_graph_reads_where_it_lies(folders):
    model = model_of(folders["tiny"])
    module = experts_of(model)[0]
    original = module.parametrizations[STACKS[0]].original
    dense(module)
    torch.cuda.synchronize()
    before = counts().fetches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack = dense(module)
    assert counts().fetches == before
    for _ in range(2):
        graph.replay()
        assert torch.equal(stack, dense(module))
        with torch.no_grad():
            original.copy_(original.roll(1, 0))
    del graph, stack


def test_freed_while_a_graph_is_captured(folders):
    """Unpinning synchronizes, which would end the capture. So the memory is unpinned together with the next block that is freed."""
    model = model_of(folders["tiny"])
    kept = [module.parametrizations[name].original.data for module in experts_of(model) for name in STACKS]
    del model
    gc.collect()
    assert len(host_memory.living()) == 4 and len(kept) == 8
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        kept.clear()
    assert not host_memory.blocks and len(host_memory.cuda.pending) == 4
    graph.replay()
    assert y.tolist() == [2] * 4
    logits(model_of(folders["tiny"]))
    gc.collect()
    assert not host_memory.cuda.pending


# --- memory ---


def shared_memory():
    """Return the bytes of this process in pages that a child would share."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * 1024


def test_nothing_is_left_after_the_model(folders, monkeypatch):
    model = adapted(folders["tiny"], "all")  # what a process allocates once
    train(model, steps=1)
    del model
    gc.collect()
    torch.cuda.synchronize()
    before, shared = torch.cuda.memory_allocated(), shared_memory()
    model = adapted(folders["medium"], "all")
    train(model, steps=1, tokens=512)
    held = counts().in_host
    room = 6 * 6 * 3 * host_memory.ALIGNMENT  # six layers of two stacks and four linear layers
    assert len(host_memory.blocks) == 6 * 6 * 3 and counts().resident
    assert held <= shared_memory() - shared <= held + room + 6 * 4096 + 2**20
    codes, cudart = [], torch.cuda.cudart()
    unregister = cudart.cudaHostUnregister
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda place: codes.append(int(unregister(place))) or codes[-1])
    del model
    gc.collect()
    assert not host_memory.blocks and not counts().resident
    assert codes == [0] * 6
    assert torch.cuda.memory_allocated() - before < 2**20
    assert shared_memory() - shared < 2**20


def test_memory_that_cannot_be_pinned(folders, monkeypatch):
    """The error names this model, and the next kernel raises no error."""
    memory = memoryview(host_memory.mmap.mmap(-1, 2**25))
    monkeypatch.setattr(host_memory.mmap, "mmap", lambda _, size: memory[:size])  # the second time it is pinned already
    with pytest.raises(MemoryError, match=r"could not be pinned.*already"):
        model_of(folders["tiny"])
    assert torch.ones(3, device="cuda").sum().item() == 3
    monkeypatch.undo()
    gc.collect()
    assert not host_memory.blocks
    logits(model_of(folders["tiny"]))


def test_the_peak_while_loading_is_within_the_budget(folders):
    """The peak is the budget, everything that is not packed experts, and the stack that is being packed."""
    peaks, held = {}, {}
    size = 0
    for where in ("off", "all", "three"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = model_of(folders["medium"], f"{3 * size}B" if where == "three" else where)
        peaks[where] = torch.cuda.max_memory_allocated() - before
        held[where] = torch.cuda.memory_allocated() - before
        size = sizes_of(model)[0]
        if where == "three":
            train(with_lora(model), steps=1, tokens=512)
            assert 3 * size <= counts().resident <= 3 * size + 2 * 18 * host_memory.ALIGNMENT
        del model
    print({where: f"{peaks[where] / size:.2f}, held {held[where] / size:.2f} experts modules" for where in peaks})
    assert held["all"] <= held["off"] - 6 * size + 2**20 and held["three"] <= held["off"] - 5 * size + 2**20
    assert peaks["all"] <= peaks["off"] - 5 * size and peaks["three"] <= peaks["off"] - 4 * size


# --- dense models ---

DENSE = {
    "tiny": ({}, 24),
    # a layer of Llama-3.1-8B: 109 MB packed
    "real": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}, 1024,
    ),
}  # fmt: skip
DENSE_LAYERS = 6
OPTIONS: dict[str, dict[str, str]] = {
    "plain": {}, "lora": {"lora": "fused"}, "fast": {"lora": "fused", "matmul": "auto", "cache": "auto", "activations": "auto"},
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_folders(tmp_path_factory):
    places = {}
    for name, (changes, _) in DENSE.items():
        places[name] = tmp_path_factory.mktemp(f"dense-{name}")
        with torch.device("cuda"):
            saved(dense_model(DENSE_LAYERS, device="cuda", **changes), places[name])
        places[f"{name}-packed"] = tmp_path_factory.mktemp(f"dense-{name}-packed")
        load_dense(places[name]).save_pretrained(places[f"{name}-packed"])
    gc.collect()
    torch.cuda.empty_cache()
    return places


def dense_of(folder, where, **options):
    nf4_patch.enable(offload=where, **options)
    torch.manual_seed(0)
    return load_dense(folder)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", CHECKPOINTING)
@pytest.mark.parametrize("name", DENSE)
def test_dense_steps_are_those_of_the_resident_model(dense_folders, name, way, options):
    folder, tokens = dense_folders[name], DENSE[name][1]

    def steps(where):
        model = with_lora_on_all(dense_of(folder, where, **OPTIONS[options]), lora_dropout=0.1)
        torch.manual_seed(0)
        started = time.perf_counter()
        found = train(model, STEPS, CHECKPOINTING[way], tokens)
        torch.cuda.synchronize()
        print(f"\n{name}, {way}, {options}, {where}: {1e2 * (time.perf_counter() - started):.1f} ms a step")
        return model, found

    model, want = steps("off")
    (size,) = set(sizes_of(model))
    del model
    assert same_steps(steps("off")[1], want), "it does not repeat without offload either"
    assert want[0].isfinite().all() and want[0][0] != want[0][-1]
    for where in ("all", f"{3 * size}B"):
        model, found = steps(where)
        assert same_steps(found, want), where
        assert all_in_host(model) or where != "all"
        known = counts()
        assert known.in_host == (DENSE_LAYERS - (where != "all")) * size
        if options != "fast":  # where the cache reads for the first time after the steps
            train(model, steps=1, tokens=tokens)
            assert counts().late <= known.late + 2
        del model, found
        gc.collect()


@pytest.mark.parametrize("source", ["real", "real-packed"])
def test_the_peak_while_a_dense_model_is_loaded(dense_folders, source):
    """The peak is the size, one layer in 16 bits, and everything that is not a packed weight of a layer."""
    layer = 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)  # bytes in 16 bits
    peaks, held, size = {}, {}, 0
    for where in ("off", "all", "three"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = dense_of(dense_folders[source], f"{3 * size}B" if where == "three" else where)
        peaks[where] = torch.cuda.max_memory_reserved() - before
        held[where] = torch.cuda.memory_allocated() - before
        size = sizes_of(model)[0]
        del model
    others = held["off"] - DENSE_LAYERS * size
    print({where: f"{peaks[where] / 2**20:.0f} MiB, held {held[where] / 2**20:.0f}" for where in peaks}, others / 2**20)
    assert held["all"] <= others + 2**21 and held["three"] <= others + size + 2**21
    for where, resident in (("all", 0), ("three", size)):
        assert peaks[where] <= others + resident + layer, where


def test_few_rows_are_multiplied_from_the_buffers(dense_folders):
    """Run steps of one token, with and without an adapter. Each layer is prefetched once per step."""
    for lora in (False, True):
        found = []
        for where in ("off", "all"):
            model = dense_of(dense_folders["real"], where, matmul="auto")
            model = with_lora_on_all(model).train() if lora else model.train()
            ids = torch.zeros(1, 1, dtype=torch.long, device="cuda")
            with torch.no_grad():
                found.append([model(input_ids=ids).logits for _ in range(3)])
        assert all(map(torch.equal, *found))
        before = counts()
        with torch.no_grad():
            model(input_ids=ids)
        torch.cuda.synchronize()
        assert counts().late == before.late and counts().fetches == before.fetches + DENSE_LAYERS
        assert sum(each.hits for each in nf4_patch.status().shapes if "fused" in each.kernel) > 0


def test_dense_readers(dense_folders, tmp_path):
    resident, model = (dense_of(dense_folders["tiny"], where) for where in ("off", "all"))
    ids = torch.arange(6, device="cuda")[None]
    found = [each.eval().generate(ids, max_new_tokens=8, do_sample=False) for each in (resident, model)]
    assert torch.equal(*found)
    merged = []
    for each in (resident, model):
        adapted = with_lora_on_all(each)
        adapted.merge_adapter()
        adapted.unmerge_adapter()
        merged.append(adapted.merge_and_unload())
    assert all_in_host(merged[1])
    for ours, theirs in zip(packed_of(merged[0]).values(), packed_of(merged[1]).values(), strict=True):
        assert all(map(torch.equal, tensors_of(*ours), tensors_of(*theirs)))
    merged[1].save_pretrained(tmp_path)
    again = load_dense(tmp_path)
    assert all_in_host(again) and torch.equal(logits(again), logits(merged[0]))
    moved = again.cpu().cuda()
    gc.collect()
    assert none_in_host(moved) and torch.equal(logits(moved), logits(merged[0]))


# --- offload="auto" ---


@pytest.fixture
def margin(monkeypatch):
    """Set the margin to 64 MiB, so that the number of layers decides how much memory is needed."""
    monkeypatch.setattr(memory, "MARGIN", 2**26)
    monkeypatch.setattr(memory, "MARGIN_PART", 0)
    yield memory.MARGIN
    torch.cuda.set_per_process_memory_fraction(1.0)


def cap(size):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layers", [0, 3, DENSE_LAYERS])
def test_spare_memory_holds_layers(dense_folders, margin, options, layers):
    """The cap leaves room for about this many layers. The steps are bit-identical to those of the resident model."""
    found = []
    for where in ("off", "all", "auto"):
        model = with_lora_on_all(
            dense_of(dense_folders["real"], where, **OPTIONS[options] | {"cache": "off"}), lora_dropout=0.1
        )
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        found.append(train(model, STEPS, CHECKPOINTING["recomputed"], 1024))
        needed = torch.cuda.memory_reserved()
        if where == "all":
            size = max(block.size for block in host_memory.living())
            cap(needed + margin + int((layers + 0.5) * size))
        if where != "auto":
            del model
            gc.collect()
    assert same_steps(found[1], found[0]) and same_steps(found[2], found[0])
    known = counts()
    print(f"\n{options}, room for {layers}: {known}")
    assert all_in_host(model) and known.in_host == sum(sizes_of(model))
    assert known.kept * size == prefetch.taken[0]
    if options != "fast":  # where kept activations counted as needed
        assert abs(known.kept - layers) <= 1
    nf4_patch.release()
    assert prefetch.taken[0] == 0


def test_layers_are_given_back_before_a_larger_batch(dense_folders, margin):
    """The larger batch does not fit next to the resident layers."""
    found, size = [], 0
    for where in ("off", "all", "auto"):
        training = Training(with_lora_on_all(dense_of(dense_folders["real"], where)))
        torch.cuda.empty_cache()
        training.steps(5, 256)
        small = torch.cuda.memory_reserved()
        if where == "auto":
            assert counts().kept == DENSE_LAYERS and prefetch.taken[0] == DENSE_LAYERS * size
        training.steps(1, 2048)
        if where == "auto":
            assert counts().kept == 0 and counts().waits == "BATCH"
        training.steps(3, 2048)
        if where == "all":
            size, large = max(block.size for block in host_memory.living()), torch.cuda.memory_reserved()
            assert large > small + margin + (DENSE_LAYERS // 2) * size
            cap(large + (DENSE_LAYERS // 2) * size)
        training.steps(4, 256)
        found.append(torch.stack(training.losses))
        del training
        gc.collect()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert prefetch.taken[0] == 0


# --- processes ---


FORKED = """
import gc, os, sys, torch
sys.path.insert(0, sys.argv[1])
from offloaded import logits, model_of

model = model_of(sys.argv[2])
want = logits(model)
child = os.fork()
if not child:
    del model
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(logits(model), want)
print("the parent reads on")
"""


def test_a_forked_child_leaves_it_alone(folders, tmp_path):
    """When the child ends, it unpins none of its parent's memory."""
    output = run([sys.executable, "-c", FORKED, SUPPORT, folders["tiny"]], tmp_path)
    assert "the parent reads on" in output


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("words", [(), ("auto",)], ids=["experts", "dense, auto"])
def test_two_processes(words, tmp_path):
    output = run([sys.executable, *TORCHRUN, PROGRAM, *words], tmp_path)
    print(output)
    assert output.count("the steps of the resident model") == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus(folders):
    """Each GPU has its own prefetcher."""
    places = {f"model.layers.{layer}": layer % 2 for layer in range(6)}
    places |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    found = []
    for where in ("off", "all"):
        model = with_lora(model_of(folders["medium"], where, device_map=places))
        found.append(train(model, steps=STEPS, tokens=128))
        assert where == "off" or len(nf4_patch.status().offload) == 2
        del model
        gc.collect()
    assert same_steps(*found)
