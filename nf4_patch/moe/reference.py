"""The functions of launch.py in plain PyTorch. They compute in fp32 and round each result once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def combine(
    rows: Tensor, row_of: Tensor, dtype: torch.dtype, weights: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    found = rows[row_of].float()
    found = found if weights is None else found * weights[..., None].float()
    found = found if addend is None else found + addend[row_of].float()
    return found.sum(dim=1).to(dtype)


def weigh(
    gradient: Tensor, addend: Tensor | None, rows: Tensor, slot_of: Tensor, weights: Tensor, of_weights: bool
) -> tuple[Tensor, Tensor | None]:
    found = gradient.float() * weights.flatten()[slot_of].float()[:, None]
    found = found if addend is None else found + addend.float()
    # Do not write into a tensor, because ``gradient`` might be a batch of gradients.
    products = (gradient.float() * rows.float()).sum(dim=1).index_select(0, slot_of.argsort())
    return found.to(gradient.dtype), products.view(weights.shape).to(weights.dtype) if of_weights else None


def silu_and_mul(rows: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = rows.float() if addend is None else rows.float() + addend.float()
    gate, up = total.chunk(2, dim=1)
    return (silu(gate) * up).to(rows.dtype), total.to(rows.dtype)


def silu_and_mul_backward(rows: Tensor, gradient: Tensor) -> Tensor:
    (gate, up), gradient = rows.float().chunk(2, dim=1), gradient.float()
    sigmoid = gate.sigmoid()
    of_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, gradient * gate * sigmoid], dim=1).to(rows.dtype)
