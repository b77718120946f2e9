"""``nf4-patch bench --matmul``: X @ W.T with a 4-bit W, by rows of X: ours, theirs, dense, and the weight only read."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from rich.table import Table

import nf4_patch

from ...nf4.dequantize import reference
from ...nf4.layout import Layout
from ...patching.replacement import fields_of, switch
from ...patching.stats import ledger
from ..report import Report, Tell, silent
from .dequantize import name_of, quantized
from .peers import BITSANDBYTES, OURS, original
from .shapes import MODELS, Model, projections
from .timing import Call, Machine, Times, gpu_times, machine, rotation

logger = logging.getLogger("nf4_patch")

UNSLOTH = "Unsloth GEMV"  # one row only
DEQUANTIZE = "dequantize + matmul"
THEIR_DEQUANTIZE = "theirs, dequantize + matmul"
DENSE = "dense"
READ = "read"
PEERS = (BITSANDBYTES, UNSLOTH, THEIR_DEQUANTIZE, DEQUANTIZE, DENSE)
ROWS = tuple(2**i for i in range(14))
CHECKED_ROWS = 512  # of X, against fp64: every row that a fused product serves
SLACK = 1.01  # the order of the additions; what is left of the error is rounding that both share
METHOD = (
    "GPU time of one product, us: CUDA-graph replays over weights that overflow the L2, in turns, medians. "
    f'{OURS}: bitsandbytes\' op with enable(matmul="auto"); {BITSANDBYTES}: the same op unpatched. '
    f"{DEQUANTIZE}: our kernel, then F.linear. {DENSE}: F.linear of a bf16 weight. {READ}: the packed bytes only read."
)


@dataclass(frozen=True)
class Product:
    """One weight shape and number of rows: the times, and the errors against fp64 that allow a ratio."""

    shape: tuple[int, int]
    rows: int
    times: dict[str, Times]
    errors: dict[str, float]  # relative, ours and dequantize + matmul
    fused: bool  # ours ran the fused product

    @property
    def subject(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]} M={self.rows}"

    @property
    def accurate(self) -> bool:
        return self.errors[OURS] <= SLACK * self.errors[DEQUANTIZE]

    def ratio(self, peer: str) -> float | None:
        """How many times ours is as fast as the peer; None where it was less accurate, or nothing was measured."""
        if not self.accurate or peer not in self.times:
            return None
        return self.times[peer].median / self.times[OURS].median

    @property
    def noise(self) -> float:
        return max(times.noise for times in self.times.values())

    @property
    def failures(self) -> list[str]:
        if self.accurate:
            return []
        ours, theirs = self.errors[OURS], self.errors[DEQUANTIZE]
        return [f"{self.subject}: error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "rows": self.rows,
            "fused": self.fused,
            "accurate": self.accurate,
            "errors": self.errors,
            "median": {name: times.median for name, times in self.times.items()},
            "noise": {name: times.noise for name, times in self.times.items()},
            "ratio": {peer: self.ratio(peer) for peer in PEERS},
        }


@dataclass(frozen=True)
class Products(Report):
    """Every shape by rows. A ratio is shown only where ours was as accurate in this run."""

    machine: Machine
    products: list[Product] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [failure for product in self.products for failure in product.failures]

    @property
    def exit_code(self) -> int:
        return 1 if self.failures else 0

    def render(self) -> Iterable[RenderableType]:
        yield str(self.machine)
        yield METHOD
        for shape in dict.fromkeys(product.shape for product in self.products):
            yield ""
            yield table(shape, [product for product in self.products if product.shape == shape])
        yield from self.failures

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": {**vars(self.machine)},
            "method": METHOD,
            "products": [product.as_dict() for product in self.products],
            "failures": self.failures,
            "exit_code": self.exit_code,
        }


def table(shape: tuple[int, int], products: Sequence[Product]) -> Table:
    result = Table(title=f"{shape[0]}x{shape[1]}, us", title_justify="left", padding=0)
    for column in ("M", OURS, *PEERS, READ, f"vs {BITSANDBYTES}", f"vs {UNSLOTH}", f"vs {DENSE}", "noise"):
        result.add_column(column, justify="right")
    for product in products:
        cells = [str(product.rows)]
        for name in (OURS, *PEERS, READ):
            mark = "*" if name == OURS and product.fused else ""
            cells.append(f"{product.times[name].median:.1f}{mark}" if name in product.times else "")
        for peer in (BITSANDBYTES, UNSLOTH, DENSE):
            ratio = product.ratio(peer)
            less = "less accurate" if peer in product.times else ""
            cells.append(f"{ratio:.2f}x" if ratio is not None else less)
        result.add_row(*cells, f"{100 * product.noise:.1f} %")
    result.caption, result.caption_justify = "* the fused product", "left"
    return result


def exact(layout: Layout) -> torch.Tensor:
    """The weight in fp64: code * scale with no rounding to 16 bits."""
    scales = reference.block_scales(layout, False).double().repeat_interleave(layout.blocksize)
    packed = layout.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(-1).long()
    return (layout.code.double()[nibbles] * scales).view(tuple(layout.shape))


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def with_patch(on: bool, call: Callable[[], Any]) -> Any:
    """``call`` as it runs with the patch and its fused product, or without: a graph keeps what it captured."""
    before = switch.on, switch.matmul
    switch.on, switch.matmul = on, "auto"
    try:
        return call()
    finally:
        switch.on, switch.matmul = before


def multiply(x: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
    """bitsandbytes' op for a nested state: what Linear4bit's forward reaches."""
    return torch.ops.bitsandbytes.gemm_4bit(
        x, packed, list(state.shape), state.state2.absmax, state.blocksize, state.quant_type, None,
        state.absmax, state.state2.code, state.offset,
    )  # fmt: skip


def gemv() -> Callable[..., Any] | None:
    """Unsloth's own product of one row, unpatched; None where it is not installed or refuses this machine."""
    if importlib.util.find_spec("unsloth") is None:
        return None
    try:
        importlib.import_module("unsloth")
    except Exception as error:  # Unsloth refuses machines and releases in many ways
        logger.warning("Unsloth is installed and cannot be measured: %s: %s", type(error).__name__, error)
        return None
    module = "unsloth.kernels.utils"
    found: Callable[..., Any] | None = original(module, "_fast_gemv_bnb") or original(module, "fast_gemv")
    return found


def product_hits() -> int:
    return sum(tally.hits for key, tally in ledger.tallies.items() if key[2].endswith("product"))


def others(x: torch.Tensor, unsloth: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
    """By name what multiplies x by a packed weight of a state beside our product; ``unsloth`` one row only."""
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    found: dict[str, Callable[..., Any]] = {
        BITSANDBYTES: lambda packed, state: with_patch(False, lambda: multiply(x, packed, state)),
        DEQUANTIZE: lambda packed, state: F.linear(x, nf4_patch.dequantize_nf4(packed, state)),
        THEIR_DEQUANTIZE: lambda packed, state: F.linear(x, dequantize(packed, state)),
    }
    if len(x) == 1 and unsloth is not None:
        row = x.view(1, 1, -1)
        found[UNSLOTH] = lambda packed, state: unsloth(row, packed, state)
    return found


def one_product(
    weights: Sequence[tuple[torch.Tensor, Any]], dense: Sequence[torch.Tensor], truth_weight: torch.Tensor,
    m: int, unsloth: Callable[..., Any] | None,
) -> Product:  # fmt: skip
    """Check ours against fp64, then time every variant over ``weights``."""
    n, k = dense[0].shape
    from . import traffic_kernel

    x = torch.randn(m, k, dtype=dense[0].dtype, device="cuda")
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    packed, state = weights[0]
    before = product_hits()
    ours = with_patch(True, lambda: multiply(x, packed, state))[:CHECKED_ROWS]
    fused = product_hits() > before
    theirs = F.linear(x, dequantize(packed, state))[:CHECKED_ROWS]
    truth = x[:CHECKED_ROWS].double() @ truth_weight.t()
    errors = {OURS: error(ours, truth), DEQUANTIZE: error(theirs, truth)}

    few = weights if m <= 256 else weights[:4]  # then X, the 16-bit weight and the result overflow the L2 themselves

    def calls(function: Callable[..., Any]) -> list[Call]:
        return [functools.partial(function, packed, state) for packed, state in few]

    variants: dict[str, Sequence[Call]] = {
        OURS: calls(lambda packed, state: with_patch(True, lambda: multiply(x, packed, state))),
        **{name: calls(function) for name, function in others(x, unsloth).items()},
        DENSE: [functools.partial(F.linear, x, weight) for weight in dense],
        READ: [traffic_kernel.reader(packed) for packed, _ in few],
    }
    return Product((n, k), m, gpu_times(variants, rounds=10), errors, fused)


def check_machine() -> None:
    """Whether products can be compared here.

    Raises:
        RuntimeError: there is no NVIDIA GPU, or bitsandbytes has no fused product to compare with (before 0.50).
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise RuntimeError("no NVIDIA GPU: nothing can be measured here")
    import bitsandbytes  # noqa: F401 (registers its ops)

    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        raise RuntimeError("bitsandbytes before 0.50 has no gemm_4bit to compare with: pip install -U bitsandbytes")


def rotating(shape: tuple[int, int], dtype: torch.dtype) -> list[tuple[torch.Tensor, Any]]:
    """Enough weights to overflow the L2."""
    return quantized(shape, dtype, max(4, min(24, rotation(shape[0] * shape[1] // 2))))


def measure(
    models: Iterable[Model] | None = None, rows: Sequence[int] = ROWS, with_unsloth: bool = True, tell: Tell = silent
) -> Products:
    """Every projection of the models, bf16, by rows of X.

    Raises:
        RuntimeError: what :func:`check_machine` says.
    """
    check_machine()
    unsloth = gemv() if with_unsloth else None
    chosen = [shape for model in models or (MODELS[1], MODELS[3]) for shape in projections(model)]
    products = []
    with nf4_patch.enabled(matmul="auto"):
        for i, shape in enumerate(dict.fromkeys(chosen)):
            weights = rotating(shape, torch.bfloat16)
            dense = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
            packed, state = weights[0]
            truth_weight = exact(Layout(packed, *fields_of(state)))
            for m in rows:
                tell(f"matmul {name_of(shape, torch.bfloat16)}, {m} rows", i, len(chosen))
                products.append(one_product(weights, dense, truth_weight, m, unsloth))
            del weights, dense, truth_weight
            torch.cuda.empty_cache()
    return Products(machine(), products)
