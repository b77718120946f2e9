"""On a GPU without a table, the first use of a size measures the real kernels, and does not change the caller's state."""

from __future__ import annotations

import contextlib
import time

import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import CUDA, MEASURED, error, exact, hits_by_shape, linear
from oracle import layout_of

import nf4_patch
from nf4_patch.matmul import choice
from nf4_patch.nf4.weight import forget
from nf4_patch.patching.counters import counters

SHAPE = (4096, 4096)
ROWS = (1, 2, 5, 8, 9, 16, 17, 32, 33, 64)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) < (8, 0), reason="bf16"),
]


@pytest.fixture
def unknown(monkeypatch):
    """Remove the shipped table and all measurements. Return the list of new measurements."""
    monkeypatch.setattr(choice, "has_table", lambda capability: False)
    monkeypatch.setattr(choice, "_configs", {})
    monkeypatch.setattr(choice, "measurements", {})
    made, measure = [], choice.measure

    def listed(*arguments):
        found = measure(*arguments)
        made.append((*arguments[:5], found))
        return found

    monkeypatch.setattr(choice, "measure", listed)
    nf4_patch.enable(matmul="auto")
    return made


def x_of(m, k=SHAPE[1]):
    return torch.randn(m, k, dtype=torch.bfloat16, device=CUDA)


def hits():
    return sum(hits_by_shape().values())


def test_measured_sizes_are_served_and_right(unknown):
    layer = linear(*SHAPE)
    packed, state = layer.weight, layer.weight.quant_state
    truth, dense = exact(layout_of(packed.data, state)), F.dequantize_4bit(packed, state)
    served = 0
    for m in ROWS:
        counters.reset()
        x = x_of(m)
        with torch.no_grad():
            y, again = layer(x), layer(x)
        found = unknown[-1][-1]
        assert found is not None and found.us, m
        assert min(found.us.values()) > 1 and hits() == 2 * (found.config is not None), (m, found)
        assert torch.equal(y, again)
        served += found.config is not None
        want = x.double() @ truth.t()
        assert error(y, want) <= 1.01 * error(x @ dense.t(), want), m
    ranges = [(low, high) for _, low, high, *_ in unknown]
    assert ranges == [(1, 1), (2, 2), (5, 8), (9, 16), (17, 24), (25, 32), (33, 48), (49, 64)]
    if MEASURED:
        assert served == len(ROWS)  # the table of this GPU has every one of these sizes
    print(*nf4_patch.status().matmul, sep="\n")
    assert len(nf4_patch.status().matmul) == len(ranges)


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode, lambda: torch.device("cpu")])
def test_a_measurement_leaves_random_state_memory_and_result_alone(unknown, context):
    layer, x = linear(*SHAPE), x_of(8)
    with torch.no_grad():
        wanted = layer(x)  # measured and compiled
        choice.measurements.clear()
        choice._configs.clear()
        forget()  # no launch of this weight is remembered
        torch.cuda.synchronize()
        random, allocated, begin = torch.cuda.get_rng_state(), torch.cuda.memory_allocated(), time.perf_counter()
        stream = torch.cuda.Stream()
        with context(), torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        torch.cuda.synchronize()
        print(f"measured in {1e3 * (time.perf_counter() - begin):.0f} ms")
    first, second = (found.config for *_, found in unknown)
    assert first != second or torch.equal(y, wanted)  # two configs add in two orders
    assert torch.equal(torch.cuda.get_rng_state(), random) and error(y, wanted.double()) < 0.01
    assert torch.cuda.memory_allocated() - allocated <= y.nbytes + 512


def test_a_first_use_in_a_capture_runs_the_original_and_stands(unknown):
    layer, x = linear(*SHAPE), x_of(8)
    nf4_patch.disable()
    with torch.no_grad():
        wanted = layer(x)
        nf4_patch.enable(matmul="auto")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, wanted) and torch.equal(layer(x), wanted) and not unknown and hits() == 0
        x = x_of(16)
        wanted, graph = layer(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
    assert len(unknown) == 1 and torch.equal(y, wanted)


def test_the_first_use_in_a_compiled_model_with_cuda_graphs(unknown, fresh_dynamo):
    """The warm-up of the compiled code measures, and the code's private memory pool stays consistent."""
    model = torch.nn.Sequential(linear(*SHAPE), linear(*SHAPE)).eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    x = x_of(8)
    with torch.no_grad():
        results = [compiled(x).clone() for _ in range(4)]
        eager = model(x)
    assert len(unknown) == 1
    if MEASURED:
        assert hits() > 0
    assert all(torch.equal(result, results[0]) for result in results)
    assert error(results[0], eager.double()) < 0.01
