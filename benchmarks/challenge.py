"""python -m benchmarks.challenge: the public Unsloth NF4 challenge, 3000 synchronized dequantizations per configuration.

The MLP has three ``Linear4bit`` layers with double quantization. Two warm-ups run the checks, at the default tolerances
of torch.testing. Then all three weights are dequantized 1000 times. This code follows the published description of the
challenge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import nf4_patch
from benchmarks import bits, main
from benchmarks.baselines import baselines
from benchmarks.products import subject_of
from benchmarks.record import BITSANDBYTES, OURS, Row
from benchmarks.timing import Times
from nf4_patch.nf4.runtime import same_bits
from nf4_patch.tools.report import Progress

METHOD = "The public NF4 challenge: checks during the warm-ups, a synchronize after every call, both orders, medians."
# (hidden, intermediate, seed, dtype, batch, length)
CONFIGURATIONS = (
    (2048, 8192, 3407, torch.float16, 2, 3333),
    (1024, 4096, 3409, torch.bfloat16, 5, 777),
    (4096, 14336, 3408, torch.bfloat16, 3, 2048),
)
ITERATIONS = 1000
WARMUPS = 2
Dequantize = Callable[[Any], torch.Tensor]  # takes a Linear4bit layer


class WrongResult(AssertionError):
    """A dequantization failed the challenge's checks, so it is not timed."""


class MLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) with bitsandbytes' 4-bit layers, for x with ``hidden`` features."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype, device: str):
        super().__init__()
        self.up = linear(hidden, intermediate, dtype, device)
        self.gate = linear(hidden, intermediate, dtype, device)
        self.down = linear(intermediate, hidden, dtype, device)

    @property
    def layers(self) -> tuple[torch.nn.Module, ...]:
        return self.up, self.gate, self.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def linear(inputs: int, outputs: int, dtype: torch.dtype, device: str) -> Any:
    """Return a Linear4bit with random weights, quantized by bitsandbytes on ``device``."""
    from bitsandbytes.nn import Linear4bit

    layer: Any = Linear4bit(
        inputs, outputs, bias=False, compute_dtype=dtype, compress_statistics=True, quant_type="nf4"
    ).to(dtype)
    layer = layer.to(device)
    layer.weight.quant_state.dtype = dtype
    return layer


def multiply(x: torch.Tensor, mlp: MLP, dequantize: Dequantize) -> torch.Tensor:
    """Run the MLP with weights from ``dequantize``."""
    hidden = F.silu(x @ dequantize(mlp.gate).t()) * (x @ dequantize(mlp.up).t())
    return hidden @ dequantize(mlp.down).t()


def check(mlp: MLP, x: torch.Tensor, dequantize: Dequantize, reference: Dequantize) -> None:
    """Check each weight against the reference, and the whole MLP against bitsandbytes' forward.

    Raises:
        WrongResult: a check failed.
    """
    try:
        for layer in mlp.layers:
            torch.testing.assert_close(dequantize(layer), reference(layer))
        with torch.no_grad():
            torch.testing.assert_close(multiply(x, mlp, dequantize), mlp(x))
    except AssertionError as error:
        raise WrongResult(str(error)) from None


def seconds(mlp: MLP, dequantize: Dequantize) -> float:
    """Time ITERATIONS dequantizations of all three weights, synchronizing after every call."""
    begin = time.perf_counter()
    for _ in range(ITERATIONS):
        for layer in mlp.layers:
            dequantize(layer)
            torch.cuda.synchronize()
    return time.perf_counter() - begin


def of_layer(dequantize: Callable[..., torch.Tensor]) -> Dequantize:
    return lambda layer: dequantize(layer.weight, layer.weight.quant_state)


def rows(tell: Progress) -> Iterator[Row]:
    """Yield a row per configuration, with the functions timed in both orders, and then the total."""
    functions: dict[str, Dequantize] = {name: of_layer(other) for name, other in baselines().items()}
    functions[OURS] = nf4_patch.triton_dequantize_nf4
    reference = functions[BITSANDBYTES]
    orders = (list(functions), list(reversed(functions)))
    found = []
    for i, (hidden, intermediate, seed, dtype, batch, length) in enumerate(CONFIGURATIONS):
        subject = subject_of((intermediate, hidden), dtype)
        tell(f"challenge {subject}", i, len(CONFIGURATIONS))
        torch.manual_seed(seed)
        mlp = MLP(hidden, intermediate, dtype, "cuda")
        x = torch.randn(batch, length, hidden, dtype=dtype, device="cuda")
        same = {
            name: all(same_bits(functions[OURS](layer), function(layer)) for layer in mlp.layers)
            for name, function in functions.items()
            if name != OURS
        }
        taken: dict[str, list[float]] = {name: [] for name in functions}
        for order in orders:
            for name in order:
                for _ in range(WARMUPS):
                    check(mlp, x, functions[name], reference)
                taken[name].append(seconds(mlp, functions[name]))
        times = {name: Times(tuple(values)) for name, values in taken.items()}
        sizes = {"hidden": hidden, "intermediate": intermediate}
        found.append(Row(subject, "s", times, bits(same), sizes=sizes))
        yield found[-1]
    yield total(found)


def total(rows: Sequence[Row]) -> Row:
    """Sum the rows of each order. The total passes its check of bits if every row passed."""
    first = rows[0]
    times = {
        name: Times(tuple(sum(parts) for parts in zip(*(row.times[name].values for row in rows), strict=True)))
        for name in first.times
    }
    return Row("total", "s", times, bits({name: all(row.checks[name].passed for row in rows) for name in first.checks}))


if __name__ == "__main__":
    main({"challenge": METHOD}, lambda tell: {"challenge": rows(tell)})
