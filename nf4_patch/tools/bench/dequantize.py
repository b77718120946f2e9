"""``nf4-patch bench``: dequantization next to bitsandbytes', on the GPU and on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

import nf4_patch

from ...nf4.runtime import same_bits
from ..llama import LLAMA_8B, projections, training_dtype
from ..patch import dequantize_4bit, patch
from ..report import NotAvailable, Progress, silent
from .record import BITSANDBYTES, EMPTY, OURS, Bench, Row, bits
from .timing import Call, alternating, gpu_times, host_us, machine, rotation

METHOD = {
    "dequantize": "GPU time of one call: CUDA-graph replays over weights that overflow the L2, alternating, medians.",
    "host": "Host time of one eager call, GPU idle before: allocation, guards and statistics included.",
}
Packed = tuple[torch.Tensor, Any]
Functions = dict[str, Callable[..., Any]]  # (packed, quant_state, out=None) -> weight, by name


def measure(tell: Progress = silent) -> Bench:
    """The weights of a Llama 8B, in the dtype that this GPU trains in."""
    others = {BITSANDBYTES: dequantize_4bit()}
    weights = [(shape, training_dtype()) for shape in projections(LLAMA_8B)]
    sections = {"dequantize": list(on_gpu(weights, others, tell, {})), "host": list(on_host(others, tell))}
    return Bench(machine(), sections, METHOD)


def subject_of(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} {'bf16' if dtype is torch.bfloat16 else 'fp16'}"


def random_weights(shape: Sequence[int], dtype: torch.dtype, count: int) -> list[Packed]:
    """Distinct random NF4 weights with nested statistics, as a QLoRA checkpoint holds them."""
    from bitsandbytes.functional import quantize_4bit

    def one() -> Packed:
        weight = torch.randn(*shape, dtype=dtype, device="cuda") * 0.02
        return quantize_4bit(weight, compress_statistics=True, quant_type="nf4")

    return [one() for _ in range(count)]


def traffic(shape: Sequence[int], itemsize: int) -> int:
    """Bytes a dequantization must move: packed, absmax, second-level absmax in; the weight out."""
    n = shape[0] * shape[1]
    return n // 2 + n // 64 + -(-n // 64 // 256) * 4 + n * itemsize


def agree(weights: Sequence[Packed], others: Functions, outs: Sequence[torch.Tensor]) -> dict[str, bool]:
    """For each of the others whether ours gives its bits, for every weight, into memory that held NaN."""
    same = dict.fromkeys(others, True)
    for (packed, state), out in zip(weights, outs, strict=True):
        out.fill_(float("nan"))
        nf4_patch.dequantize_nf4(packed, state, out)
        for name, other in others.items():
            same[name] = same[name] and same_bits(out, other(packed, state))
    return same


def on_gpu(
    weights: Iterable[tuple[tuple[int, int], torch.dtype]], others: Functions, tell: Progress, limits: Functions
) -> Iterator[Row]:
    """Each shape and dtype: ours, the others, and ``limits``, whose results are not compared."""
    chosen = list(weights)
    for i, (shape, dtype) in enumerate(chosen):
        tell(f"dequantize {subject_of(shape, dtype)}", i, len(chosen))
        yield one_shape(shape, dtype, others, limits)
        torch.cuda.empty_cache()


def one_shape(shape: tuple[int, int], dtype: torch.dtype, others: Functions, limits: Functions) -> Row:
    nbytes = traffic(shape, dtype.itemsize)
    weights = random_weights(shape, dtype, rotation(nbytes))
    outs = [torch.empty(shape, dtype=dtype, device="cuda") for _ in weights]
    checks = bits(agree(weights, others, outs))
    variants: dict[str, Sequence[Call]] = {
        name: [functools.partial(function, *weight, out=out) for weight, out in zip(weights, outs, strict=True)]
        for name, function in {OURS: nf4_patch.dequantize_nf4, **others, **limits}.items()
    }
    sizes = dict(zip(("n", "k"), shape, strict=True))
    return Row(subject_of(shape, dtype), "us", gpu_times(variants), checks, nbytes, sizes)


def on_host(others: Functions, tell: Progress) -> Iterator[Row]:
    """One eager call on a 64x64 weight: what is at bitsandbytes.functional.dequantize_4bit with the patch on.

    Allocation, guards and statistics included; ``torch.empty`` of the same result in the same turns.
    """
    import bitsandbytes.functional

    tell("host time")
    packed, state, parameter = small_weight()
    with patch(True):
        patched = bitsandbytes.functional.dequantize_4bit
        for subject, weight in (("a new tensor", packed), ("a new tensor from a Params4bit", parameter)):
            calls = {name: functools.partial(other, weight, state) for name, other in others.items()}
            calls[EMPTY] = functools.partial(torch.empty, (64, 64), dtype=torch.bfloat16, device=packed.device)
            yield host(subject, functools.partial(patched, weight, state), calls)


def small_weight() -> tuple[torch.Tensor, Any, Any]:
    """The packed weight, its quant_state, and both as the parameter of a Linear4bit."""
    from bitsandbytes.nn import Params4bit

    packed, state = random_weights((64, 64), torch.bfloat16, 1)[0]
    return packed, state, Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)


def host(
    subject: str, ours: Call, others: Mapping[str, Call], hits: Callable[[], int] = lambda: nf4_patch.status().hits
) -> Row:
    """Host times of ours and the others.

    Raises:
        NotAvailable: ours was not served as ``hits`` counts, so its time would be another's.
    """
    before = hits()
    result = ours().clone()
    if hits() != before + 1:
        raise NotAvailable(f"the patched function was not a hit:\n{nf4_patch.status()}")
    checks = bits({name: same_bits(result, call()) for name, call in others.items() if name != EMPTY})
    return Row(subject, "us", alternating({OURS: ours, **others}, host_us, rounds=20), checks)
