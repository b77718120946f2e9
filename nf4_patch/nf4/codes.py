"""The 16 code values of NF4 and FP4."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from . import runtime

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
    """Return the 16 code values in fp32. bitsandbytes' ``get_4bit_type`` would use PyTorch's default dtype.

    Raises:
        KeyError: ``quant_type`` is neither "nf4" nor "fp4".
    """
    values = CODES[quant_type]
    code = torch.empty(len(values), dtype=torch.float32, device=device)
    for index, value in enumerate(values):
        code[index].fill_(value)  # not a copy from the host, which would break a CUDA graph capture
    return code


_remembered: dict[tuple[str, torch.device], torch.Tensor] = {}


def remembered_code(quant_type: str, device: torch.device) -> torch.Tensor:
    """Return the code values on a device. The tensor is made once and never freed, because launches keep its address.

    Raises:
        KeyError: ``quant_type`` is neither "nf4" nor "fp4".
        KernelUnavailable: GRAPH_CAPTURE, because the first use is inside a capture, whose memory pool might be freed.
    """
    code = _remembered.get((quant_type, device))
    if code is None:
        if device.type == runtime.DEVICE and runtime.is_capturing():
            raise runtime.KernelUnavailable("a CUDA graph is being captured", "GRAPH_CAPTURE")
        # Upload the values in a new thread, which uses the default stream and has no inference mode. While torch.compile
        # warms up a CUDA graph, the current thread would allocate from the private pool of the graph.
        with ThreadPoolExecutor(1) as thread:
            uploaded = thread.submit(uploaded_code, quant_type, device).result()
        code = _remembered.setdefault((quant_type, device), uploaded)  # another thread might have been first
    return code


def uploaded_code(quant_type: str, device: torch.device) -> torch.Tensor:
    """Copy the code values to a device. The copy is synchronous, so any CUDA stream may read the result."""
    return code_of(quant_type, torch.device("cpu")).to(device)
