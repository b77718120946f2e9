"""python -m benchmarks.dequantize: dequantization compared with baselines and the traffic ceiling, on the GPU and on the host.

The ceiling moves the bytes of a 4-bit dequantization without decoding, as fast as Triton can. It reads 32-bit words and
writes four words for each, because a packed word of 8 nibbles becomes 8 elements of 16 bits. A dequantization that is
slower than the ceiling spends the difference on decoding. Another section times a dequantization with the matmul that
follows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import bitsandbytes.functional
import bitsandbytes.nn
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from bitsandbytes.autograd import _functions

import nf4_patch
from benchmarks import bits, challenge, main
from benchmarks.baselines import baselines
from benchmarks.models import LLAMA_8B, projections, training_dtype
from benchmarks.products import Functions, Packed, random_weights, subject_of
from benchmarks.record import BITSANDBYTES, CEILING, EMPTY, OURS, Row
from benchmarks.timing import Call, alternating, gpu_times, over, rotation
from nf4_patch.cache.store import cache
from nf4_patch.nf4.runtime import same_bits
from nf4_patch.patching import placement
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import NotAvailable, Progress

METHOD = {
    "dequantize": "GPU time of one call: medians of alternating CUDA-graph replays over weights that overflow the L2 cache. "
    "ceiling: the same bytes moved without decoding; %: our speed relative to the ceiling.",
    "dequantize + matmul": "GPU time of dequantize and F.linear in bf16, measured in the same way.",
    "host": "Host time of one eager call that starts on an idle GPU, including allocation, guards and statistics.",
}
CHALLENGE = [(intermediate, hidden) for hidden, intermediate, *_ in challenge.CONFIGURATIONS]
IN_BF16 = [
    (intermediate, hidden) for hidden, intermediate, _, dtype, *_ in challenge.CONFIGURATIONS if dtype is torch.bfloat16
]
SHAPES = dict.fromkeys((*IN_BF16, *projections(LLAMA_8B)))
HOST_CALLS = 200  # below the depth of the launch queue (1024), so that the host never waits for the GPU
# (num_warps, words per thread). The ceiling is the fastest of these on this GPU and size.
CONFIGS = ((4, 1), (4, 2), (8, 2), (16, 2))


@triton.jit
def move(words, out, THREADS: tl.constexpr, UNROLL: tl.constexpr):
    """Read ``words``, int32 [n], and write ``out``, int32 [4 n].

    A CTA moves UNROLL * THREADS words, and loads all before it stores.
    """
    tl.static_assert(UNROLL == 1 or UNROLL == 2)
    first = tl.program_id(0).to(tl.int64) * (THREADS * UNROLL)
    thread = tl.arange(0, THREADS)
    column = tl.arange(0, 4 * THREADS)
    word = tl.load(words + first + thread, eviction_policy="evict_first")
    if UNROLL == 2:
        word2 = tl.load(words + first + THREADS + thread, eviction_policy="evict_first")
    four = tl.reshape(tl.join(tl.join(word, word), tl.join(word, word)), [4 * THREADS])
    tl.store(out + first * 4 + column, four, eviction_policy="evict_first")
    if UNROLL == 2:
        four = tl.reshape(tl.join(tl.join(word2, word2), tl.join(word2, word2)), [4 * THREADS])
        tl.store(out + (first + THREADS) * 4 + column, four, eviction_policy="evict_first")


def ceiling(config: tuple[int, int], packed: torch.Tensor, state: Any, out: torch.Tensor) -> None:
    """Read ``packed`` and write ``out`` (16-bit elements), in whole CTAs."""
    num_warps, unroll = config
    words, target = packed.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    threads = 32 * num_warps
    move[words.numel() // (threads * unroll),](words, target, threads, unroll, num_warps=num_warps)


def with_ceiling(row: Row) -> Row:
    """Return the row with only the fastest of its ceilings."""
    found = [name for name in row.times if name.startswith(CEILING)]
    fastest = min(found, key=lambda name: row.times[name].median)
    kept = {name: taken for name, taken in row.times.items() if name not in found}
    return dataclasses.replace(row, times=kept | {CEILING: row.times[fastest]})


def host_us(call: Call) -> float:
    """Return the host microseconds per call. The GPU is idle when the first call starts."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return (time.perf_counter() - begin) * 1e6 / HOST_CALLS


def traffic(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that a dequantization reads (packed, absmax, second-level absmax) and writes (the weight)."""
    n = shape[0] * shape[1]
    return n // 2 + n // 64 + -(-n // 64 // 256) * 4 + n * itemsize


def agree(weights: Sequence[Packed], others: Functions, outs: Sequence[torch.Tensor]) -> dict[str, bool]:
    """Return for each of the others whether nf4_patch's result is bit-identical for every weight.

    The result's memory held NaN before.
    """
    same = dict.fromkeys(others, True)
    for (packed, state), out in zip(weights, outs, strict=True):
        out.fill_(float("nan"))
        nf4_patch.dequantize_nf4(packed, state, out)
        for name, other in others.items():
            same[name] = same[name] and same_bits(out, other(packed, state))
    return same


def one_shape(shape: tuple[int, int], dtype: torch.dtype, others: Functions, limits: Functions) -> Row:
    """Compare nf4_patch's dequantization with the others. Then time all of them, and ``limits``, whose results are not compared."""
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


def small_weight() -> tuple[torch.Tensor, Any, Any]:
    """Return a packed weight, its quant_state, and a Params4bit of both, as in a Linear4bit."""
    packed, state = random_weights((64, 64), torch.bfloat16, 1)[0]
    return packed, state, bitsandbytes.nn.Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)


def host(
    subject: str, ours: Call, others: Mapping[str, Call], hits: Callable[[], int] = lambda: nf4_patch.status().hits
) -> Row:
    """Measure the host times of nf4_patch and of the others.

    Raises:
        NotAvailable: the call of nf4_patch did not count as a hit, so its time would be the original's.
    """
    before = hits()
    result = ours().clone()
    if hits() != before + 1:
        raise NotAvailable(f"the patched function was not a hit:\n{nf4_patch.status()}")
    checks = bits({name: same_bits(result, call()) for name, call in others.items() if name != EMPTY})
    return Row(subject, "us", alternating({OURS: ours, **others}, host_us, rounds=20), checks)


def dequantizations(
    tell: Progress, shapes: Iterable[tuple[int, int]] = SHAPES, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
) -> Iterator[Row]:
    others = baselines(in_graph=True)
    ceilings: Functions = {f"{CEILING} {config}": functools.partial(ceiling, config) for config in CONFIGS}
    chosen = list(itertools.product(shapes, dtypes))
    for i, (shape, dtype) in enumerate(chosen):
        tell(f"dequantize {subject_of(shape, dtype)}", i, len(chosen))
        yield with_ceiling(one_shape(shape, dtype, others, ceilings))
        torch.cuda.empty_cache()


def with_matmul(tell: Progress) -> Iterator[Row]:
    """Time dequantize and F.linear with 512 and 2,048 rows, for weights of a Llama 8B.

    A faster store must not slow down the matmul.
    """
    dequantizers = {OURS: nf4_patch.dequantize_nf4, **baselines(in_graph=True)}
    chosen = [(shape, m) for shape in projections(LLAMA_8B) for m in (512, 2048)]
    dtype = training_dtype()
    for i, (shape, m) in enumerate(chosen):
        subject = f"{subject_of(shape, dtype)}, {m} rows"
        tell(f"dequantize + matmul {subject}", i, len(chosen))
        weights = random_weights(shape, dtype, min(rotation(traffic(shape, dtype.itemsize)), 40))
        x = torch.randn(m, shape[1], dtype=dtype, device="cuda")

        def multiply(function: Callable[..., Any], packed: torch.Tensor, state: Any, x: torch.Tensor = x) -> Any:
            return F.linear(x, function(packed, state))

        # Every variant uses the same matmul, so bit-identical weights give bit-identical results.
        functions = {name: functools.partial(multiply, function) for name, function in dequantizers.items()}
        results = {name: function(*weights[0]) for name, function in functions.items()}
        checks = bits({name: same_bits(results[OURS], result) for name, result in results.items() if name != OURS})
        times = gpu_times(over(weights, functions))
        yield Row(subject, "us", times, checks, sizes={"n": shape[0], "k": shape[1], "m": m})
        torch.cuda.empty_cache()


def host_rows(tell: Progress) -> Iterator[Row]:
    """Measure host times of a 64x64 weight: as a new tensor, in Unsloth's global buffer, and from the cache.

    The calls go to the replacements that the patch installs, so times include allocation, guards and statistics.
    """
    tell("host time")
    others = baselines()
    packed, state, parameter = small_weight()
    with patch(True):
        patched = bitsandbytes.functional.dequantize_4bit
        for subject, weight in (("a new tensor", packed), ("a new tensor from a Params4bit", parameter)):
            calls: dict[str, Call] = {name: functools.partial(other, weight, state) for name, other in others.items()}
            calls[EMPTY] = functools.partial(torch.empty, (64, 64), dtype=torch.bfloat16, device=packed.device)
            yield host(subject, functools.partial(patched, weight, state), calls)
    unsloth = {name: other for name, other in others.items() if name != BITSANDBYTES}
    if unsloth:
        calls = {
            name: functools.partial(other, parameter, state, use_global_buffer=True) for name, other in unsloth.items()
        }
        with patch(True):
            ours = functools.partial(unsloth_replacement(), parameter, state, None, True)
            yield host("Unsloth's global buffer", ours, calls)
    with patch(True, cache="1GiB"):
        # with the globals of bitsandbytes' autograd functions: the cache serves no other caller
        read: Any = lambda packed, state: F.dequantize_4bit(packed, state)  # type: ignore[attr-defined]  # noqa: E731
        call = types.FunctionType(read.__code__, vars(_functions))
        patched = functools.partial(call, parameter, state)
        patched()  # fills the cache
        stock = {BITSANDBYTES: functools.partial(others[BITSANDBYTES], parameter, state)}
        yield host("a cached weight", patched, stock, lambda: cache.hits)


def unsloth_replacement() -> Callable[..., Any]:
    """Return the replacement that the patch has installed in Unsloth."""
    for name, entry in placement.installed.items():
        if name.startswith("unsloth.") and entry.replacement is not None:
            return entry.replacement
    raise RuntimeError(f"Unsloth is imported but not patched:\n{nf4_patch.status()}")


def rows(tell: Progress) -> dict[str, Iterator[Row]]:
    return {"dequantize": dequantizations(tell), "dequantize + matmul": with_matmul(tell), "host": host_rows(tell)}


if __name__ == "__main__":
    main(METHOD, rows)
