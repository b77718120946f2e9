"""``nf4-patch bench --generate``: tokens a second of a 4-bit Llama with a static cache, the patch off and on.

The model is built here, from bitsandbytes' own Linear4bit and random weights: nothing is downloaded, and a step is
the same code for both sides. Compiled: torch.compile between the linear layers (which are opaque ops to it), the whole
step captured in one CUDA graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import nf4_patch

from ...nf4.layout import Layout
from ...patching.quant_state import fields_of
from ...patching.switch import switch
from ..report import Progress, require_gpu, silent
from .matmul import error, exact, fused_matmul_hits
from .peers import OURS, original
from .record import RATE, Bench, Check, Row, accuracy
from .shapes import LLAMA_8B, Model
from .timing import Times, capture, machine

STOCK = "stock"
BATCHES = (1, 8, 32)
CACHE = 512  # positions of the static cache
VOCABULARY = 128256
HEAD = 128
METHOD = (
    "Tokens a second, greedy, wall time of {tokens} tokens, both sides alternating, medians. {layers} layers of {name}, "
    "NF4 nested, bf16, static cache of {cache} positions, lm_head of {vocabulary} in bf16; eager and compiled."
)


def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def add_and_normalize(x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x + more
    return x, normalize(x, weight)


def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of one position: x [batch, heads, HEAD]."""
    half = x.shape[-1] // 2
    angle = position * torch.exp(torch.arange(half, device=x.device) * (-math.log(500000.0) / half))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """One new position: q [batch, 1, heads * HEAD], keys and values [batch, heads of them, CACHE, HEAD], written at it."""
    batch, groups = q.shape[0], keys.shape[1]
    q = rotate(q.view(batch, -1, HEAD), position).view(batch, groups, -1, HEAD)  # heads that share a key: more queries
    keys.index_copy_(2, position, rotate(k.view(batch, groups, HEAD), position)[:, :, None])
    values.index_copy_(2, position, v.view(batch, groups, 1, HEAD))
    seen = torch.arange(keys.shape[2], device=q.device) <= position
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None]).reshape(batch, 1, -1)


def gate_and_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


BETWEEN = (normalize, add_and_normalize, attend, gate_and_up)  # the linear layers: what torch.compile sees


class Llama:
    """A decoder of 4-bit layers: per layer q, k, v, o, gate, up, down as bitsandbytes' Linear4bit."""

    def __init__(self, model: Model, layers: int, vocabulary: int, device: torch.device):
        import bitsandbytes

        hidden, kv, inner = model.hidden, model.key_value, model.intermediate
        self.model = model

        def linear(rows: int, columns: int) -> Any:
            layer = bitsandbytes.nn.Linear4bit(
                columns, rows, bias=False, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4",
                device=device,
            )  # fmt: skip
            layer.weight.data = torch.randn(rows, columns, dtype=torch.bfloat16, device=device) / columns**0.5
            return layer.to(device)

        shapes = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
        shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        self.layers: list[list[Any]] = [[linear(*shape) for shape in shapes] for _ in range(layers)]
        self.embedding = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, device=device)
        self.head = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, device=device) / hidden**0.5
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def logits(self, token: torch.Tensor, caches: Sequence[Any], position: torch.Tensor, between: Sequence[Any]) -> Any:
        """Logits [batch, vocabulary] after token [batch] at position [1]; ``between``: BETWEEN, compiled or not."""
        norm, add_and_norm, attention, activation = between
        x = self.embedding[token][:, None]
        h = norm(x, self.norm)
        for (q, k, v, o, gate, up, down), (keys, values) in zip(self.layers, caches, strict=True):
            x, h = add_and_norm(x, o(attention(q(h), k(h), v(h), keys, values, position)), self.norm)
            x, h = add_and_norm(x, down(activation(gate(h), up(h))), self.norm)
        return h[:, 0] @ self.head.t()


class Generation:
    """Greedy generation of one batch: ``step`` is one token, all its state in place, so that a graph can hold it."""

    def __init__(self, model: Llama, batch: int, patch: bool, compiled: bool, cache: int = CACHE):
        device = model.norm.device
        self.model, self.batch, self.patch, self.compiled = model, batch, patch, compiled
        shape = (batch, model.model.key_value // HEAD, cache, HEAD)
        self.caches = [
            tuple(torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)) for _ in model.layers
        ]
        self.token = torch.arange(batch, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.between = [torch.compile(part, dynamic=False) for part in BETWEEN] if compiled else BETWEEN
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None
        self.hits = 0

    def step(self) -> None:
        self.logits = self.model.logits(self.token, self.caches, self.position, self.between)
        self.token.copy_(self.logits.argmax(-1))
        self.position.add_(1)

    def restart(self) -> None:
        self.token.copy_(torch.arange(self.batch, device=self.token.device))
        self.position.zero_()

    def prepare(self) -> None:
        """Run the step until nothing compiles any more; if compiled, capture it."""
        switch.on, switch.matmul = self.patch, "auto"
        for _ in range(3):
            self.step()
        before = fused_matmul_hits()
        self.step()
        self.hits = fused_matmul_hits() - before
        if self.compiled:
            self.graph = capture([self.step])

    def run(self, tokens: int) -> float:
        """Tokens a second over ``tokens`` steps from an empty cache."""
        switch.on, switch.matmul = self.patch, "auto"
        self.restart()
        step = self.step if self.graph is None else self.graph.replay
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(tokens):
            step()
        torch.cuda.synchronize()
        return self.batch * tokens / (time.perf_counter() - begin)


def accuracies(model: Llama, batch: int) -> dict[str, Check]:
    """Each weight shape of a layer at this batch: our error against fp64 beside that of dequantize + linear."""
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    found = {}
    for linear in model.layers[0]:
        weight, state = linear.weight, linear.weight.quant_state
        shape = "x".join(map(str, state.shape))
        if shape in found:
            continue
        x = torch.randn(batch, 1, state.shape[1], dtype=torch.bfloat16, device=weight.device)
        truth = x.double() @ exact(Layout(weight.data, *fields_of(state))).t()
        switch.on, switch.matmul = True, "auto"
        ours, theirs = linear(x), F.linear(x, dequantize(weight.data, state))
        found[shape] = accuracy(error(ours, truth), error(theirs, truth), f"{shape} ")
    return found


@torch.no_grad()
def measure(
    model: Model = LLAMA_8B, layers: int = 32, batches: Sequence[int] = BATCHES, tokens: int = 64, rounds: int = 6,
    tell: Progress = silent,
) -> Bench:  # fmt: skip
    """Each batch, eager and compiled: stock and ours alternating.

    Raises:
        RuntimeError: there is no NVIDIA GPU.
    """
    require_gpu()
    tell(f"building {layers} layers of {model.name} in 4 bits")
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    llama = Llama(model, layers, VOCABULARY, device)
    rows = []
    with nf4_patch.enabled(matmul="auto"):
        for i, batch in enumerate(batches):
            checks = accuracies(llama, batch)
            for mode in ("eager", "compiled"):
                tell(f"generating, batch {batch}, {mode}", i, len(batches))
                rows.append(one_row(llama, batch, mode, checks, tokens, rounds))
    method = METHOD.format(tokens=tokens, layers=layers, name=model.name, cache=CACHE, vocabulary=VOCABULARY)
    return Bench(machine(), {"generation": rows}, {"generation": method})


def one_row(llama: Llama, batch: int, mode: str, checks: dict[str, Check], tokens: int, rounds: int) -> Row:
    sides = {name: Generation(llama, batch, name == OURS, mode == "compiled") for name in (STOCK, OURS)}
    first = {}
    for name, side in sides.items():
        side.prepare()
        side.restart()
        side.step()
        assert side.logits is not None
        first[name] = side.logits.double()
    values: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, side in sides.items():
            rate = side.run(tokens)
            if round_:
                values[name].append(rate)
    rates = {name: Times(tuple(taken)) for name, taken in values.items()}
    torch.cuda.empty_cache()
    return row(batch, mode, rates, sides[OURS].hits, checks, error(first[OURS], first[STOCK]))


def row(batch: int, mode: str, rates: dict[str, Times], hits: int, checks: dict[str, Check], distance: float) -> Row:
    """One batch, eager or compiled: tokens a second of both sides.

    Args:
        hits: fused matmuls a token, without which there is no ratio.
        distance: relative, of the first logits of both sides.
    """
    ran = Check(hits > 0, f"{hits} fused matmuls ran" if hits else "no fused matmul ran")
    notes = {"fused matmuls a token": str(hits), "logits differ by": f"{distance:.1e}"}
    return Row(f"batch {batch}, {mode}", RATE, rates, {"hits": ran, **checks}, sizes={"batch": batch}, notes=notes)
