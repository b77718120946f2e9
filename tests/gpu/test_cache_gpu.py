"""The cache on a GPU: the memory that the allocator takes, streams, captured graphs, and training with and without a cache."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from subprocess_python import program
from target import linear, same, step

import nf4_patch
from nf4_patch.cache.option import Uncached
from nf4_patch.cache.store import OTHER_STREAM_READS, cache

pytestmark = pytest.mark.gpu
ROWS = 2048  # above bitsandbytes' own fused kernel, which does not repeat itself to the bit: its forward dequantizes
MIB = 2**20
CUDA = torch.device("cuda", 0)


def layer_of(outputs=1024, seed=0):
    return linear(CUDA, 1024, outputs, seed=seed, weights=torch.bfloat16)


def run(layer):
    return step(layer, CUDA, 1024, rows=ROWS)


def test_another_stream_decodes_for_itself():
    layer = layer_of()
    want = run(layer)
    nf4_patch.enable(cache=64 * MIB)
    assert same(run(layer), want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first, second = run(layer), run(layer)
    side.synchronize()
    assert same(first, want)
    assert same(second, want)
    assert cache.uncached[Uncached.OTHER_STREAM] == OTHER_STREAM_READS  # and then it was decoded there
    assert same(run(layer), want)


def test_a_captured_graph_outlives_the_cache(monkeypatch):
    # where an earlier test compiled with CUDA graphs, every stream but the default one may be their warm-up's
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    layer = layer_of()
    x = torch.randn(ROWS, 1024, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        want = layer(x)
        nf4_patch.enable(cache=64 * MIB)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(x)
            side.synchronize()
            assert cache.hits == 2
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                got = layer(x)
        assert cache.hits == 2
        assert cache.uncached[Uncached.CUDA_GRAPH] >= 1
        nf4_patch.disable()
        ruins = [torch.full((1024, 1024), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(got, want)
    assert ruins[0][0, 0] == 7


HALF_OF_THEM = 3 * (2 * MIB + MIB)


@pytest.mark.parametrize(
    ("mode", "steps"),
    [(64 * MIB, 50), (HALF_OF_THEM, 50), pytest.param(HALF_OF_THEM, 2000, marks=pytest.mark.slow)],
)
def test_checkpointed_training_to_the_bit_and_in_the_same_memory(mode, steps):
    layers = [layer_of(seed=seed) for seed in range(6)]

    def train(steps):
        adapters = [torch.zeros(1024, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in layers]
        optimizer = torch.optim.SGD(adapters, lr=1e-2)
        generator = torch.Generator("cuda").manual_seed(2)
        losses, memory = [], set()
        for number in range(steps):
            x = torch.randn(ROWS, 1024, dtype=torch.bfloat16, device="cuda", generator=generator).requires_grad_()
            for layer, adapter in zip(layers, adapters, strict=True):
                block = lambda x, layer, adapter: torch.nn.functional.silu(layer(x)) + adapter  # noqa: E731
                x = torch.utils.checkpoint.checkpoint(block, x, layer, adapter, use_reentrant=False)
            loss = x.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if number > 2:
                memory.add(torch.cuda.memory_allocated() - losses[0].nbytes * len(losses))
        return torch.stack(losses), torch.stack([a.detach() for a in adapters]), memory

    want = train(steps)
    nf4_patch.enable(cache=mode)
    got = train(steps)
    assert same(got[:2], want[:2])
    assert cache.hits >= (cache.hits + cache.misses) * 0.3
    assert max(got[2]) - min(got[2]) < MIB


@pytest.mark.parametrize("first", [0, pytest.param(10, marks=pytest.mark.slow)])
def test_what_fits_without_auto_fits_with_it(first):
    gc.collect()
    torch.cuda.empty_cache()  # the program would take this process's memory for another training
    assert program("auto_cache", first, 50 if first else 10).stdout.split()[-1] == "auto"


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[32:8,64:4,>:2]",
        "max_split_size_mb:64",
        "max_split_size_mb:100,roundup_power2_divisions:8",
        "expandable_segments:True",
    ],
)
def test_the_cache_counts_what_the_allocator_takes(settings):
    program("cache_memory", PYTORCH_CUDA_ALLOC_CONF=settings)


@pytest.mark.parametrize("cache", ["off", "1GiB"])
def test_the_first_use_in_the_warmup_of_a_graph(cache):
    program("first_use_in_warmup", cache)
