"""python -m benchmarks.generation: tokens per second of a 4-bit Llama with a static cache, with the patch off and on.

The model is transformers' Llama with random weights, and a step generates one token. In compiled mode, torch.compile compiles
the model and a CUDA graph captures a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import main
from benchmarks.matmul import fused_matmul_hits
from benchmarks.models import LLAMA_8B, build_4bit, config_of
from benchmarks.products import error, exact
from benchmarks.record import OURS, RATE, Check, Row, accuracy
from benchmarks.timing import Times, alternating, capture
from nf4_patch.patching.quant_state import weight_of
from nf4_patch.tools.patch import dequantize_4bit, patch
from nf4_patch.tools.report import Progress

STOCK = "stock"
LAYERS = 8
BATCHES = (1, 8, 32)
TOKENS, ROUNDS = 64, 6
CACHE = 512  # positions of the static cache
METHOD = (
    f"Tokens per second, greedy: wall-clock time of {TOKENS} tokens, medians, alternating between both sides. {LAYERS} layers of "
    f"Llama 3.1 8B in transformers, nested NF4, static cache of {CACHE} positions; eager, and compiled in a CUDA graph."
)


def patched(name: str) -> AbstractContextManager[None]:
    return patch(name == OURS, matmul="auto")


class Generation:
    """Greedy generation of one batch. ``step`` updates all state in place, so that a CUDA graph can capture it."""

    def __init__(self, model: Any, batch: int, compiled: bool, cache: int = CACHE):
        from transformers import StaticCache

        self.model = torch.compile(model, dynamic=False) if compiled else model
        self.cache = StaticCache(config=model.config, max_cache_len=cache)
        self.first = torch.arange(1, batch + 1, device=model.device)[:, None]  # 0 is padding, whose embedding is zero
        self.token = self.first.clone()
        self.compiled, self.hits = compiled, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        model(input_ids=self.token, past_key_values=self.cache)  # allocates the cache outside the compiled code
        self.restart()
        self.logits: torch.Tensor | None = None

    def step(self) -> torch.Tensor:
        """Return the logits [batch, vocabulary] after ``token`` [batch, 1], and replace ``token`` by the next token."""
        logits: torch.Tensor = self.model(input_ids=self.token, past_key_values=self.cache).logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def restart(self) -> None:
        self.token.copy_(self.first)
        self.cache.reset()

    def prepare(self) -> torch.Tensor:
        """Run steps until nothing compiles any more. In compiled mode, capture a step. Return the first logits."""
        for _ in range(3):
            self.step()
        before = fused_matmul_hits()
        self.step()
        self.hits = fused_matmul_hits() - before
        if self.compiled:
            self.graph = capture([self.step])
        self.restart()
        return self.step()

    def run(self, tokens: int) -> float:
        """Return the tokens per second over ``tokens`` steps from an empty cache."""
        self.restart()
        step: Any = self.step if self.graph is None else self.graph.replay
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(tokens):
            step()
        torch.cuda.synchronize()
        return len(self.first) * tokens / (time.perf_counter() - begin)


def accuracies(model: Any, batch: int) -> dict[str, Check]:
    """Check each weight shape of a layer at this batch: nf4_patch's error against fp64 must not exceed that of
    dequantize + linear.
    """
    from bitsandbytes.nn import Linear4bit

    dequantize = dequantize_4bit()
    found: dict[str, Check] = {}
    linears: list[Any] = [module for module in model.model.layers[0].modules() if isinstance(module, Linear4bit)]
    for linear in linears:
        weight, state = linear.weight, linear.weight.quant_state
        shape = "x".join(map(str, state.shape))
        if shape in found:
            continue
        x = torch.randn(batch, 1, state.shape[1], dtype=state.dtype, device=weight.device)
        truth = x.double() @ exact(weight_of(weight.data, state)).t()
        with patched(OURS):
            ours = linear(x)
        theirs = F.linear(x, dequantize(weight.data, state))
        found[shape] = accuracy(error(ours, truth), error(theirs, truth), f"{shape} ")
    return found


def one_row(model: Any, batch: int, mode: str, checks: dict[str, Check]) -> Row:
    torch._dynamo.reset()
    sides = {name: Generation(model, batch, mode == "compiled") for name in (STOCK, OURS)}
    first = {}
    for name, side in sides.items():
        with patched(name):
            first[name] = side.prepare().double()
    rates = alternating(sides, lambda side: side.run(TOKENS), ROUNDS, patched)
    positions = {name: int(side.cache.get_seq_length()) for name, side in sides.items()}
    counted = Check(set(positions.values()) == {TOKENS + 1}, f"positions in the static cache: {positions}")
    torch.cuda.empty_cache()
    distance = error(first[OURS], first[STOCK])
    return row(batch, mode, rates, sides[OURS].hits, {"positions": counted, **checks}, distance)


def row(batch: int, mode: str, rates: dict[str, Times], hits: int, checks: dict[str, Check], distance: float) -> Row:
    """Return the row of one batch, eager or compiled, with the tokens per second of both sides.

    Args:
        hits: fused matmuls per token. If there are none, the row has no ratio.
        distance: the relative distance between the first logits of both sides.
    """
    ran = Check(hits > 0, f"{hits} fused matmuls ran" if hits else "no fused matmul ran")
    finite = Check(math.isfinite(distance), f"the first logits differ by {distance:.1e}")
    notes = {"fused matmuls a token": str(hits), "logits differ by": f"{distance:.1e}"}
    return Row(
        f"batch {batch}, {mode}",
        RATE,
        rates,
        {"hits": ran, "logits": finite, **checks},
        sizes={"batch": batch},
        notes=notes,
    )


@torch.no_grad()
def rows(tell: Progress) -> Iterator[Row]:
    """Yield a row for each batch and mode, with the two sides alternating."""
    tell(f"building {LAYERS} layers of Llama 3.1 8B in 4 bits")
    model = build_4bit(config_of(LLAMA_8B._replace(num_hidden_layers=LAYERS))).eval()
    for i, batch in enumerate(BATCHES):
        checks = accuracies(model, batch)
        for mode in ("eager", "compiled"):
            tell(f"generating, batch {batch}, {mode}", i, len(BATCHES))
            yield one_row(model, batch, mode, checks)


if __name__ == "__main__":
    main({"generation": METHOD}, lambda tell: {"generation": rows(tell)})
