"""The weights that ``verify`` and ``--fuzz`` compare, what bitsandbytes makes of them, and how bits are compared."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..nf4.layout import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES
from ..patching import hooks
from .report import Impossible

# Whole CTAs and part of one, partial last blocks, odd counts, rows that no blocksize divides, rank 1 to 3.
SHAPES = ((256, 512), (96, 136), (33, 77), (3, 5, 44), (4097,), (1, 1))
MATRIX, RAGGED = (256, 192), (65, 42)
LAYOUTS, TRANSPOSED, STORAGE, OFFSETS = "shapes x blocksizes", "transposed", "storage dtypes", "offset dtypes"
PAIRS = "absmax byte x packed byte"

PADDING, CANARY = 256, 0xA5  # bytes before and after every tensor; as fp32 -2.9e-16, as an absmax byte 165
SPECIAL = (0.0, -0.0, 1e-45, 1e-39, 2e-38, 6e-8, 65504.0, 7e4, 3e38, math.inf, -math.inf, math.nan)
SPECIAL_ON_CPU = tuple(x for x in SPECIAL if x == 0 or not abs(x) < 1e-7)  # its bf16 convert drops subnormals
LARGEST = {"cuda": 1 << 19, "cpu": 1 << 13}  # elements of an ordinary random case
CTA = {"cuda": 1 << 14, "cpu": 1 << 12}  # whole CTAs of every kernel: no masks


class Case(NamedTuple):
    """One weight to make and compare; what follows ``offset_dtype`` is of the random ones."""

    family: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int = 64
    nested: bool = True
    quant_type: str = "nf4"
    transposed: bool = False
    storage: torch.dtype = torch.uint8
    offset_dtype: torch.dtype = torch.float32
    number: int = 0
    start: int = 0  # bytes from a 256-byte boundary to the packed weight
    special: bool = False  # zeros, subnormals, infinities and NaN among the scales
    into: str = "new"  # "new", "out" (with canaries) or "shared"
    fault: str = ""  # or a name of fuzz.FAULTS

    def __str__(self) -> str:
        words = [
            self.quant_type, "nested" if self.nested else "flat", "x".join(map(str, self.shape)), name_of(self.dtype),
            f"blocksize {self.blocksize}",
        ]  # fmt: skip
        words += ["transposed"] if self.transposed else []
        words += [f"stored as {name_of(self.storage)}"] if self.storage is not torch.uint8 else []
        words += [f"{name_of(self.offset_dtype)} offset"] if self.offset_dtype is not torch.float32 else []
        return ", ".join(words)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def layout(self) -> Case:
        """What makes a layout, without sizes."""
        return self._replace(shape=(len(self.shape),), number=0, start=self.start % 16, fault="")


def every_case(thin: bool = False) -> Iterator[Case]:
    """Every output dtype with everything that changes the kernel or the launch path.

    ``thin``: two of the six shapes for each combination, so that every dtype and blocksize still meets every shape.
    """
    for dtype in OUTPUT_DTYPES:
        combinations = itertools.product(BLOCKSIZES, (True, False), ("nf4", "fp4"))
        for number, (blocksize, nested, kind) in enumerate(combinations):
            for shape in SHAPES[number % 3 :: 3] if thin else SHAPES:
                yield Case(LAYOUTS, shape, dtype, blocksize, nested, kind)
        for shape, nested in itertools.product((MATRIX, RAGGED), (True, False)):
            yield Case(TRANSPOSED, shape, dtype, nested=nested, transposed=True)
        for storage, transposed in itertools.product(STORAGE_DTYPES[1:], (False, True)):
            yield Case(STORAGE, MATRIX, dtype, storage=storage, transposed=transposed)
        for offset, shape in itertools.product(OFFSET_DTYPES[1:], (MATRIX, RAGGED)):
            yield Case(OFFSETS, shape, dtype, offset_dtype=offset)
        for blocksize, kind in itertools.product((64, 512), ("nf4", "fp4")):
            yield Case(PAIRS, (256, 512), dtype, blocksize, quant_type=kind)


def draw(
    seed: int, number: int, device: str, blocksizes: Sequence[int] = BLOCKSIZES, faults: Sequence[str] = ()
) -> Case:
    """Case ``number`` of ``seed``: weighted toward what models have, with everything else in it."""
    rng = random.Random(f"{seed} {number}")
    rank = rng.choices((1, 2, 3, 4), (2, 6, 2, 1))[0]
    if rng.random() < 0.3:
        shape = [rng.choice((1, 2, 3)) * CTA[device] // 64, *[1] * (rank - 1)]
        shape[-1] *= 64
    else:
        largest = LARGEST[device] if rng.random() < 0.2 else 4096
        shape = [max(1, int(largest ** (rng.random() / rank))) for _ in range(rank)]
    if rank > 2 and math.prod(shape) <= 8:
        shape[-1] *= 16  # one element of packed weight reads as transposed, and t() ends at rank 2
    n = math.prod(shape)
    nested = rng.random() < 0.7
    blocksize = rng.choice(blocksizes)
    packed_bytes = -(-n // 2)
    storage = rng.choice(STORAGE_DTYPES) if rng.random() < 0.2 else torch.uint8
    if packed_bytes % storage.itemsize:
        storage = torch.uint8
    aligned = rng.choices((0, 4 * rng.randrange(1, 16), rng.randrange(64)), (7, 2, 1))[0]
    return Case(
        family="random",
        number=number,
        shape=tuple(shape),
        dtype=rng.choice(OUTPUT_DTYPES),
        blocksize=blocksize,
        nested=nested,
        quant_type=rng.choice(("nf4", "nf4", "fp4")),
        storage=storage,
        # a kernel is compiled for each: the rare ones at one blocksize only
        offset_dtype=rng.choice(OFFSET_DTYPES) if nested and blocksize == 64 else torch.float32,
        transposed=rank <= 2 and rng.random() < 0.3,
        start=aligned - aligned % storage.itemsize,
        special=rng.random() < 0.2,
        into=rng.choices(("new", "out", "shared"), (2, 5, 2))[0],
        fault=rng.choice(faults) if faults and rng.random() < 0.25 else "",
    )


def quantized(case: Case, seed: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """The packed weight and QuantState that bitsandbytes makes of a random weight of a transformer's scale."""
    import bitsandbytes.functional as F

    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(case.shape, generator=generator) * 0.05).to(device=device, dtype=case.dtype)
    packed, state = F.quantize_4bit(
        weight, blocksize=case.blocksize, compress_statistics=case.nested,
        quant_type=case.quant_type, quant_storage=case.storage,
    )  # fmt: skip
    if case.nested:
        state.offset = state.offset.to(case.offset_dtype)
    if case.family == PAIRS:  # 256 runs of the 256 packed bytes, one absmax byte each
        packed.view(-1).copy_(torch.arange(256, device=device).to(torch.uint8).repeat(256))
        state.absmax.copy_(torch.arange(256, device=device).to(torch.uint8).repeat_interleave(512 // case.blocksize))
    return (packed.t() if case.transposed else packed), state


def bytes_in(count: int, device: torch.device, start: int = 0, fill: int = CANARY) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of canaries and the ``count`` bytes of it that begin ``start`` bytes past a boundary."""
    buffer = torch.full((count + 2 * PADDING + start,), CANARY, dtype=torch.uint8, device=device)
    view = buffer[PADDING + start : PADDING + start + count]
    if fill != CANARY:
        view.fill_(fill)
    return buffer, view


def placed(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """A copy of ``tensor`` in the middle of a buffer of canaries."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    _, view = bytes_in(raw.numel(), tensor.device, start)
    return view.copy_(raw).view(tensor.dtype).view(tensor.shape)


def random_state(case: Case, seed: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """The packed weight and QuantState of a case: every byte random."""
    from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type

    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + case.number)

    def uniform(count: int) -> torch.Tensor:
        values = torch.rand(count, generator=generator, device=device) + 0.01
        if case.special:
            special = torch.tensor(SPECIAL if device.type == "cuda" else SPECIAL_ON_CPU, device=device)
            which = torch.randint(2 * special.numel(), (count,), generator=generator, device=device)
            values = torch.where(which < special.numel(), special[which % special.numel()], values)
        return placed(values)

    def random_bytes(count: int, start: int = 0) -> torch.Tensor:
        return placed(torch.randint(256, (count,), generator=generator, device=device, dtype=torch.uint8), start)

    blocks = -(-case.numel // case.blocksize)
    packed = random_bytes(-(-case.numel // 2), case.start).view(case.storage).view(-1, 1)
    state2 = offset = None
    if case.nested:
        absmax = random_bytes(blocks)
        code2 = placed(create_dynamic_map().to(device))
        state2 = QuantState(uniform(-(-blocks // 256)), code=code2, blocksize=256, dtype=torch.float32)
        offset = placed(torch.tensor([0.0371], device=device, dtype=case.offset_dtype)).view(())
    else:
        absmax = uniform(blocks)
    code = get_4bit_type(case.quant_type, device=device)
    state = QuantState(
        absmax, torch.Size(case.shape), code, case.blocksize, case.quant_type, case.dtype, offset, state2
    )
    return (packed.t() if case.transposed else packed), state


def require_oracle(device: torch.device) -> None:
    """
    Raises:
        Impossible: bitsandbytes here computes other bits than its CUDA library, or cannot quantize every shape.
    """
    import bitsandbytes

    if device.type == "cpu" and tuple(map(int, bitsandbytes.__version__.split(".")[:2])) < (0, 50):
        raise Impossible(
            f"no GPU, and the CPU code of bitsandbytes {bitsandbytes.__version__} has other bits than its CUDA library or "
            "does not take every shape: nothing can be compared here; install bitsandbytes 0.50 or newer"
        )


def ask_bitsandbytes(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight as bitsandbytes dequantizes it.

    On the CPU it is asked for a flat shape: bitsandbytes 0.50.2 starts a new block at every row there when a
    row is even and no multiple of the blocksize. Its CUDA library does not.
    """
    import bitsandbytes.functional as F

    if packed.is_cuda:
        return F.dequantize_4bit(packed, state)
    shape = state.shape
    state.shape = torch.Size((shape.numel(),))
    try:
        weight = F.dequantize_4bit(packed.reshape(-1, 1), state).reshape(shape)
    finally:
        state.shape = shape
    return weight.t() if packed.shape[0] == 1 else weight


def differing(got: torch.Tensor, want: torch.Tensor, zeros_alike: bool, nans_alike: bool = False) -> torch.Tensor:
    """The flat indices of the elements whose bits differ, unless both are zeros of another sign or NaN, where alike.

    Where NaN are not, one differs from everything: ``got`` was poisoned with them.
    """
    got, want = got.reshape(-1), want.reshape(-1)
    integers = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    equal = got.view(integers) == want.view(integers)
    if zeros_alike:
        equal |= (got == 0) & (want == 0)
    nan = got.isnan()
    return torch.nonzero(~(equal | nan & want.isnan()) if nans_alike else ~equal | nan).reshape(-1)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Shape, dtype, strides and bits; NaN where the other is NaN; on the CPU FP4's zeros have other signs."""

    def meta(tensor: torch.Tensor) -> tuple[Any, ...]:  # a dimension of one element has any stride
        strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        return tensor.shape, tensor.dtype, strides

    return meta(got) == meta(want) and not differing(got, want, not got.is_cuda, nans_alike=True).numel()


def device_here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def use_interpreter_without_gpu() -> None:
    """Import the kernels under Triton's interpreter where there is no GPU, if nobody has imported them yet.

    Only them: the variable is put back, so that Inductor and Unsloth define theirs as usual; Triton itself is
    imported before (its gluon asserts that all of Triton was imported alike).
    """
    if torch.cuda.is_available() or "nf4_patch.nf4.dequantize.kernels" in sys.modules:
        return
    import triton  # noqa: F401

    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from ..nf4.dequantize import kernels  # noqa: F401
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """bitsandbytes as it is, also where NF4_PATCH=1 patches it on import: nothing is compared with itself."""
    import bitsandbytes.functional  # noqa: F401

    with hooks.suspended():
        yield


def place_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU (Triton's interpreter)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
