"""Functions that tests of the fused matmul share: the error against fp64, inputs, a layer, and counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import bitsandbytes as bnb
import matmul_reference
import pytest
import torch

import nf4_patch
from benchmarks.products import error, exact  # noqa: F401 (for the tests)
from nf4_patch.matmul import launch
from nf4_patch.matmul.tuning import SMALL_M_ROWS
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.weight import PackedWeight
from nf4_patch.patching.counters import counters

CUDA = torch.device("cuda", 0)
HERE = torch.cuda.get_device_capability(CUDA) if torch.cuda.is_available() else None
MEASURED = any(row.capability == HERE for row in SMALL_M_ROWS)
measured = pytest.mark.skipif(not MEASURED, reason="the fused matmul's table has no row for this GPU")


def unfused_error(
    x: torch.Tensor, layout: PackedWeight, truth: torch.Tensor, bias: torch.Tensor | None = None
) -> float:
    """Return the error of dequantize + linear against ``truth``, with cuBLAS or plain torch, whichever has the larger error.

    In a matmul of few numbers, each of the two may be accurate by chance. They round the same weights as the fused
    matmul, multiply exactly and add in fp32. Only the order of the additions differs, and so the last bit of a sum. So
    tests allow 1 % more than this error. Nearly all of the error comes from rounding the weight and the result.
    """
    linear = torch.nn.functional.linear(x, reference.dequantize(layout), bias)
    return max(error(linear, truth), error(matmul_reference.matmul(x, layout, bias), truth))


def multiply(
    x: torch.Tensor, layout: PackedWeight, bias: torch.Tensor | None = None, config: launch.SmallMConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return x @ weight.T (+ bias) from the kernel of ``config``, or of the table's config for this size."""
    (n, k), capability = layout.shape, torch.cuda.get_device_capability(x.device)
    config = config or launch.config_for(capability, x.numel() // k, n, k, runtime.multiprocessors(x.device))
    return launch.resolve(x, layout, bias, config)(x, out)


def one_hot(columns: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return x [len(columns), k] that picks these columns of a weight: 1 * w, plus zeros, in every lane and slice."""
    x = torch.zeros(len(columns), k, dtype=dtype, device=CUDA)
    x[torch.arange(len(columns), device=CUDA), columns] = 1
    return x


def adversarial(n: int, k: int, m: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, weight [n, k], x [m, k]) in fp32: heavy tails, cancelling rows, outlier columns, tiny and large numbers."""
    generator = torch.Generator(device=CUDA).manual_seed(1)
    w = torch.randn(n, k, device=CUDA, generator=generator) * 0.02
    x = torch.randn(m, k, device=CUDA, generator=generator)
    outliers = x.clone()
    outliers[:, ::257] *= 60
    weights = {
        "gaussian": w,
        "heavy tail": w * (1 + 8 * (torch.rand(n, k, device=CUDA, generator=generator) < 0.001)),
        "alternating": w.abs() * (1 - 2 * (torch.arange(k, device=CUDA) % 2)),
        "tiny": w * 1e-4,
        "large": w * 50,
    }
    inputs = {"gaussian": x, "outliers": outliers, "positive": x.abs(), "ones": torch.ones_like(x), "small": x * 1e-3}
    for weight, rows in itertools.product(weights, inputs):
        yield f"{weight} weight, {rows} x", weights[weight], inputs[rows]


def linear(n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> bnb.nn.Linear4bit:
    """Return a random 4-bit layer on the first GPU."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(k, n, bias=bias, quant_type="nf4", compute_dtype=dtype)
    layer.weight.data.normal_(std=0.02)
    return layer.to(dtype).to("cuda:0").eval()


def hits_by_shape() -> dict:
    """Return the fused matmul's hits by target, shape and dtype."""
    return {
        key: counter.hits for key, counter in counters.hit_counters.items() if key[3] == "fused matmul" and counter.hits
    }


def stock_and_fused(layer: bnb.nn.Linear4bit, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's result without the patch, and with "auto", whose hits are counted from zero.

    Check that matmul="off" gives the same bits as no patch.
    """
    with torch.no_grad():
        nf4_patch.disable()
        stock = layer(x)
        nf4_patch.enable(matmul="off")
        counters.reset()
        assert torch.equal(layer(x), stock) and not hits_by_shape(), (x.shape, hits_by_shape())
        nf4_patch.enable(matmul="auto")
        counters.reset()
        return stock, layer(x)
