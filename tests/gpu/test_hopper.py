"""The fused matmul of hundreds of rows on the GPU: its bits, its error, the same at every run, and who reaches it."""

from __future__ import annotations

import itertools

import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import adversarial, error, exact, hits_by_shape, linear, one_hot, stock_and_fused, unfused_error
from oracle import layout_of, quantized

import nf4_patch
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.matmul import hopper, launch
from nf4_patch.nf4.matmul.tuning import HOPPER_ROWS

CUDA = torch.device("cuda", 0)
MEASURED = (
    torch.cuda.is_available()
    and hopper.RELEASE in hopper.RELEASES
    and any(row.capability == torch.cuda.get_device_capability(CUDA) for row in HOPPER_ROWS)
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not MEASURED, reason="the table has no row for this GPU and Triton"),
]
CONFIGS = sorted({row.config for row in HOPPER_ROWS}) if MEASURED else []
DTYPES = (torch.bfloat16, torch.float16)

# (N, K, blocksize, M): tails of M and N, one step and many, chunks of a tile (2 to 33), several tiles a CTA.
SIZES = (
    (264, 512, 64, 300), (8, 64, 64, 70), (1000, 1088, 64, 129), (136, 8192, 4096, 511), (128, 4096, 128, 65),
    (4096, 4096, 64, 256), (14336, 4096, 64, 200), (2056, 320, 64, 512),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_one_hot_rows_return_the_bits_of_dequantize(quant_type, nested, dtype):
    for (n, k, blocksize, m), config in itertools.product(SIZES, CONFIGS):
        packed, state = quantized((n, k), dtype, CUDA, blocksize, nested, quant_type)
        columns = torch.randint(0, k, (m,), device=CUDA)
        out = torch.full((m, n), float("nan"), dtype=dtype, device=CUDA)
        launch.matmul_4bit(one_hot(columns, k, dtype), layout_of(packed, state), config=config, out=out)
        assert torch.equal(out, F.dequantize_4bit(packed, state)[:, columns].t()), (n, k, m, config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_accurate_as_dequantize_and_linear_and_the_same_at_every_run(dtype):
    """Against fp64, with a bias."""
    missed = []
    for seed, ((n, k, blocksize, m), config) in enumerate(itertools.product(SIZES, CONFIGS)):
        packed, state = quantized((n, k), dtype, CUDA, blocksize, seed % 2 == 0, seed=seed)
        layout = layout_of(packed, state)
        x, bias = torch.randn(m, k, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
        truth = x.double() @ exact(layout).t() + bias.double()
        got = launch.matmul_4bit(x, layout, bias, config)
        theirs = unfused_error(x, layout, truth, bias)
        different = sum((launch.matmul_4bit(x, layout, bias, config) != got).any() for _ in range(100))
        if error(got, truth) > 1.01 * theirs or different:
            missed.append((n, k, m, config, error(got, truth), theirs, int(different)))
    assert not missed, missed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy_on_adversarial_numbers(dtype):
    missed = []
    for (name, weight, x), config in itertools.product(adversarial(1024, 4096, 256), CONFIGS):
        packed, state = F.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
        layout, x = layout_of(packed, state), x.to(dtype)
        truth = x.double() @ exact(layout).t()
        ours = error(launch.matmul_4bit(x, layout, config=config), truth)
        theirs = error(torch.nn.functional.linear(x, F.dequantize_4bit(packed, state)), truth)
        if ours > 1.01 * theirs:
            missed.append((name, config, ours, theirs))
    assert not missed, missed


def test_a_thousand_runs_beside_other_work_have_the_same_bits():
    """Chunks of a tile wait for each other; two streams of them, and matmuls that fill the GPU, run at once."""
    config = CONFIGS[-1]
    packed, state = quantized((4096, 4096), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    assert hopper.HopperPlan.of(config, hopper.multiprocessors(CUDA), 256, 4096, 4096).split_k > 1
    x = torch.randn(256, 4096, dtype=torch.bfloat16, device=CUDA)
    want = launch.matmul_4bit(x, layout, config=config)
    other = torch.randn(8192, 8192, dtype=torch.bfloat16, device=CUDA)
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = torch.zeros(2, dtype=torch.int64, device=CUDA)
    torch.cuda.synchronize()
    for _ in range(500):
        for i, stream in enumerate(streams[:2]):
            with torch.cuda.stream(stream):
                wrong[i] += (launch.matmul_4bit(x, layout, config=config) != want).any()
        with torch.cuda.stream(streams[2]):
            other @ other
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


def test_out_stride_alignment_and_capture():
    n, k, m = 1024, 2048, 130
    packed, state = quantized((n, k), torch.bfloat16, CUDA)
    layout, config = layout_of(packed, state), CONFIGS[0]
    x = torch.randn(2, 65, k, dtype=torch.bfloat16, device=CUDA)
    want = launch.matmul_4bit(x, layout, config=config)
    assert want.shape == (2, 65, n)
    spread = torch.randn(2, 65, 2 * k, dtype=torch.bfloat16, device=CUDA)
    spread[..., ::2] = x
    odd = torch.empty(m * k + 1, dtype=torch.bfloat16, device=CUDA)[1:].view(2, 65, k).copy_(x)
    for same in (spread[..., ::2], odd):
        assert torch.equal(launch.matmul_4bit(same, layout, config=config), want)
    guarded = torch.full((m + 2, n), float("nan"), dtype=torch.bfloat16, device=CUDA)
    launch.matmul_4bit(x, layout, config=config, out=guarded[1:-1].view(2, 65, n))
    assert torch.equal(guarded[1:-1].view(2, 65, n), want) and guarded[[0, -1]].isnan().all()
    odd_out = torch.full((m * n + 1,), float("nan"), dtype=torch.bfloat16, device=CUDA)[1:].view(2, 65, n)
    assert torch.equal(launch.matmul_4bit(x, layout, config=config, out=odd_out), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch.matmul_4bit(x, layout, config=config)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator(device=CUDA).manual_seed(seed), device=CUDA))
        graph.replay()
        assert torch.equal(got, launch.matmul_4bit(x, layout, config=config))


def test_first_use_is_checked_and_a_capture_is_named(monkeypatch):
    packed, state = quantized((1024, 512), torch.bfloat16, CUDA)
    layout, x = layout_of(packed, state), torch.randn(70, 512, dtype=torch.bfloat16, device=CUDA)
    monkeypatch.setattr(runtime, "_entries", {})
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(hopper, "_checked", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(runtime.KernelUnavailable) as caught:
            launch.matmul_4bit(x, layout, config=CONFIGS[0])
        torch.zeros(1, device=CUDA)
    assert caught.value.reason == "GRAPH_CAPTURE"
    dequantize = reference.dequantize
    monkeypatch.setattr(reference, "dequantize", lambda layout: dequantize(layout) + 1)
    for _ in range(2):  # remembered
        with pytest.raises(runtime.KernelUnavailable) as caught:
            launch.matmul_4bit(x, layout, config=CONFIGS[0])
        assert caught.value.reason == "KERNEL_FAILED"
    monkeypatch.setattr(hopper, "_checked", {})
    monkeypatch.setattr(reference, "dequantize", dequantize)
    assert launch.matmul_4bit(x, layout, config=CONFIGS[0]).isfinite().all()


def test_linear4bit_runs_it_where_it_wins_and_has_its_own_bits_elsewhere(auto):
    layer = linear(14336, 4096)
    for m, served in ((128, True), (256, True), (384, False), (512, True), (600, False)):
        x = torch.randn(m, 4096, dtype=torch.bfloat16, device=CUDA)
        stock, got = stock_and_fused(layer, x)
        assert bool(hits_by_shape()) == served, (m, hits_by_shape())
        if not served:
            assert torch.equal(got, stock), m
        weight = F.dequantize_4bit(layer.weight, layer.weight.quant_state)
        truth = x.double() @ weight.double().t()
        assert error(got, truth) <= 1.01 * error(stock, truth), m


def test_a_training_step_of_128_tokens(auto):
    """The forward is the fused matmul's, dX of 128 rows the original's: the same bits from the same dY."""
    layer = linear(14336, 4096)
    x = torch.randn(128, 4096, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    dy = torch.randn(128, 14336, dtype=torch.bfloat16, device=CUDA)
    out = layer(x)
    assert hits_by_shape()
    (ours,) = torch.autograd.grad(out, x, dy)
    nf4_patch.disable()
    (theirs,) = torch.autograd.grad(layer(x), x, dy)
    assert torch.equal(ours, theirs)
    nf4_patch.enable(matmul="auto")
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), out)
