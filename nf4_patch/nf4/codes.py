"""The 16 values of NF4 and of FP4."""

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
    """[16] in fp32, whatever the default dtype (bitsandbytes' ``get_4bit_type`` follows it).

    Raises:
        KeyError: the quant_type is neither "nf4" nor "fp4".
    """
    values = CODES[quant_type]
    code = torch.empty(len(values), dtype=torch.float32, device=device)
    for index, value in enumerate(values):
        code[index].fill_(value)  # a copy from the host would end the capture of a CUDA graph
    return code


def uploaded_code(quant_type: str, device: torch.device) -> torch.Tensor:
    """``code_of``, for any stream: the copy has ended when this returns."""
    return code_of(quant_type, torch.device("cpu")).to(device)


_remembered: dict[tuple[str, torch.device], torch.Tensor] = {}


def remembered_code(quant_type: str, device: torch.device) -> torch.Tensor:
    """``code_of``, made once for each device and kept: launches hold its address, which must not be that of a graph's memory.

    Raises:
        KeyError: as ``code_of``.
        KernelUnavailable: GRAPH_CAPTURE.
    """
    code = _remembered.get((quant_type, device))
    if code is None:
        if device.type == runtime.DEVICE and runtime.is_capturing():
            raise runtime.KernelUnavailable("a CUDA graph is being captured", "GRAPH_CAPTURE")
        with torch.inference_mode(False):
            if device.type == runtime.DEVICE and runtime.current_stream(device.index):
                # torch.compile's warm-up lets one thread, on a stream of its own, allocate from a CUDA graph's private pool,
                # and fails if anything there outlives the call: another thread allocates as usual
                with ThreadPoolExecutor(1) as pool:
                    code = pool.submit(uploaded_code, quant_type, device).result()
            else:
                code = uploaded_code(quant_type, device)
        _remembered[quant_type, device] = code
    return code
