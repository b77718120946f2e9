"""The functions of launch.py in plain PyTorch, as references. They compute the result in ``dtype``."""

from __future__ import annotations

import torch
from torch import Tensor

FP64 = torch.float64


def narrow(factor: Tensor, wide: bool) -> Tensor:
    return factor.t() if wide else factor


def project(x: Tensor, factor: Tensor, wide: bool, dtype: torch.dtype = FP64) -> Tensor:
    return x.to(dtype) @ narrow(factor, wide).to(dtype)


def expand(
    inner: Tensor, factor: Tensor, wide: bool, scale: float, addend: Tensor | None, dtype: torch.dtype = FP64
) -> Tensor:
    result = scale * (inner.to(dtype) @ narrow(factor, wide).to(dtype).t())
    return result if addend is None else result + addend


def correlate(x: Tensor, inner: Tensor, wide: bool, scale: float, dtype: torch.dtype = FP64) -> Tensor:
    result = scale * (x.to(dtype).t() @ inner.to(dtype))
    return result.t() if wide else result
