"""What tests of the fused matmul share: the exact weight, the error against fp64, a layer, and what was counted."""

from __future__ import annotations

import bitsandbytes as bnb
import torch

from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.layout import Layout
from nf4_patch.nf4.matmul.tuning import SMALL_M_ROWS
from nf4_patch.patching.counters import counters

CUDA = torch.device("cuda", 0)
MEASURED = torch.cuda.is_available() and any(
    row.capability == torch.cuda.get_device_capability(CUDA) for row in SMALL_M_ROWS
)
NOT_MEASURED = "the fused matmul's table has no row for this GPU"


def exact(layout: Layout) -> torch.Tensor:
    """The weight in fp64: code * scale, not rounded."""
    scales = reference.block_scales(layout, False).double().repeat_interleave(layout.blocksize)
    packed = layout.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(-1).long()
    return (layout.code.double()[nibbles] * scales).view(layout.shape)


def error(a: torch.Tensor, truth: torch.Tensor) -> float:
    return ((a.double() - truth).norm() / truth.norm()).item()


def linear(n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> bnb.nn.Linear4bit:
    """A random 4-bit layer on the first GPU."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(k, n, bias=bias, quant_type="nf4", compute_dtype=dtype)
    layer.weight.data.normal_(std=0.02)
    return layer.to(dtype).to("cuda:0").eval()


def hits_by_shape() -> dict:
    """Hits of the fused matmul by target, shape and dtype."""
    return {
        key: counter.hits
        for key, counter in counters.hit_counters.items()
        if key[2].endswith("fused matmul") and counter.hits
    }
