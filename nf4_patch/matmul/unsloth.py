"""Replace Unsloth's functions that multiply few rows by a packed weight."""

from __future__ import annotations

import torch

from ..patching.reasons import Reason
from .product import FusedMatmul, multiplied_first


@multiplied_first
def fast_gemv(fused: FusedMatmul, X, W, quant_state, out=None) -> torch.Tensor | Reason:
    """Replace ``fast_gemv`` and ``_fast_gemv_bnb``, which multiply a single token: X [1, 1, K] to [1, 1, N].

    While Dynamo traces, Unsloth's code runs.
    """
    return fused.one_row(X, W, quant_state, out)


@multiplied_first
def gemv_rows(fused: FusedMatmul, X, W, quant_state, out) -> torch.Tensor | Reason:
    """Replace ``_gemv_rows``, which multiplies a batch of single tokens: X [M, 1, K] to [M, 1, N].

    If the fused matmul does not support a call, return the Reason. Unsloth's ``_gemv_rows`` then runs. It may return
    None, and then its caller dequantizes.
    """
    return fused.of_state(X, W, quant_state, None, out)


@multiplied_first
def matmul_lora(fused: FusedMatmul, X, W, W_quant, A, B, s, out=None, use_global_buffer=False) -> torch.Tensor | Reason:
    """Replace ``matmul_lora``, which computes a linear layer with LoRA: X @ W.T + (X @ A.T) @ B.T * s.

    If the packed weight has the shape [1, bytes], Unsloth computes X @ W, without the transpose. The replacement does
    not support such a weight, so Unsloth's code runs.
    """
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    adapted = A is not None and torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)
    # If autocast or the weight has another dtype than X, Unsloth's function runs, because the results would differ.
    # Unsloth multiplies in autocast's dtype, and rounds a weight of another dtype twice. The fused matmul does neither.
    if adapted or autocast not in (False, X.dtype) or getattr(W_quant, "dtype", X.dtype) is not X.dtype:
        return Reason.MATMUL_OPERANDS
    rows = X.view(-1, X.shape[-1])
    result = fused.of_state(rows, W, W_quant, out=out, transposed=False)
    if type(result) is Reason:
        return result
    if A is not None:
        result.addmm_(rows @ A.t().to(X.dtype), B.t().to(X.dtype), alpha=s)
    return result.view(*X.shape[:-1], -1)
