"""The 16 values of NF4 and of FP4."""

from __future__ import annotations

import torch

CODES = {
    "nf4": (  # QLoRA (arXiv 2305.14314), appendix E
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)),
}  # fmt: skip


def code_of(quant_type: str, device: torch.device) -> torch.Tensor:
    """[16] in fp32, whatever the default dtype (bitsandbytes' ``get_4bit_type`` follows it).

    Raises:
        KeyError: the quant_type is neither "nf4" nor "fp4".
    """
    return torch.tensor(CODES[quant_type], dtype=torch.float32, device=device)
