"""GPU memory that training a mixture takes, reckoned from its shapes: QLoRA with packed experts, in bytes.

benchmarks/offload.py measures it. What is reckoned: weights, adapters, gradients, optimizer, and the most that a layer or the
loss needs at a time under gradient checkpointing.
"""

from __future__ import annotations

from typing import NamedTuple

PACKED = 1 / 2 + 1 / 64 + 4 / 64 / 256  # bytes of a weight in NF4 with double quantization
HEAD_ROWS = 256  # of logits in fp32 at a time, as a loss has them that does not keep all
# what a process takes beside PyTorch's allocator (CUDA's context and kernels), and what the allocator cannot use again
CONTEXT, LOST = 0.5e9, 0.03
SCORES = 4.5  # how many of them the backward of an eager attention has at a time
STATES = {"AdamW": 2.0, "8-bit AdamW": 0.0}  # moments of an adapter's weight, in its own dtype
BYTE_STATES = {"AdamW": 0.0, "8-bit AdamW": 2 + 2 * 4 / 256}  # and in bytes
ON, OFF = "attention and experts", "attention"


class Mixture(NamedTuple):
    """The shapes of a model. ``attention``: (out, in, how many) of its projections."""

    layers: int
    mixtures: int  # layers that have experts
    hidden: int
    width: int  # of an expert
    experts: int
    chosen: int  # experts a token
    vocabulary: int
    attention: tuple[tuple[int, int, int], ...]
    linear: int = 0  # weights of other linear layers, all of them packed
    dense: int = 0  # weights that stay in 16 bits, but for the embeddings
    tied: bool = False  # the embedding is the head
    widths: int = 4  # of an expert, that a row takes in it; more where the gate is PyTorch's own
    scores: int = 0  # bytes of all heads for each pair of tokens, where the attention keeps all scores of a layer

    @property
    def unit(self) -> int:
        """Weights of the experts of a layer."""
        return 3 * self.experts * self.hidden * self.width

    @property
    def weights(self) -> int:
        linear = self.linear + sum(out * inner * count for out, inner, count in self.attention)
        return self.mixtures * self.unit + linear + self.dense + (2 - self.tied) * self.vocabulary * self.hidden

    @property
    def packed(self) -> float:
        """Bytes, with experts and linear layers packed."""
        return self.frozen() + self.experts_in("off")

    def adapters(self, rank: int, where: str) -> int:
        """Weights of LoRA."""
        found = sum(count * (out + inner) for out, inner, count in self.attention)
        if where == ON:
            found += self.mixtures * self.experts * (self.hidden + 2 * self.width + self.width + self.hidden)
        return rank * found

    def frozen(self) -> float:
        """Bytes of all weights but the packed experts."""
        linear = self.linear + sum(out * inner * count for out, inner, count in self.attention)
        return PACKED * linear + 2 * (self.dense + (2 - self.tied) * self.vocabulary * self.hidden)

    def experts_in(self, offload: str | float) -> float:
        """Bytes of packed experts on the GPU; ``offload``: "off", "all" or bytes."""
        every, unit = PACKED * self.mixtures * self.unit, PACKED * self.unit
        return {"off": every, "all": 2 * unit}[offload] if isinstance(offload, str) else min(offload, every)

    def activations(self, tokens: int) -> float:
        """The input of every layer, and what the largest layer takes, or the loss."""
        rows = tokens * self.chosen
        scores = tokens * tokens * self.scores
        layer = max(2 * self.unit + 2 * rows * (4 * self.hidden + self.widths * self.width) + scores, SCORES * scores)
        head = HEAD_ROWS * self.vocabulary * (4 + 4 + 2 + 2)
        return 2 * self.layers * tokens * self.hidden + max(layer, head)

    def training(self, tokens: int, offload: str | float, rank: int = 16, where: str = ON, optimizer: str = "8-bit AdamW",
                 size: int = 2) -> float:  # fmt: skip
        """Bytes, of PyTorch's allocator; ``size``: of an adapter's weight."""
        taken = self.frozen() + self.experts_in(offload) + self.learning(rank, where, optimizer, size)
        return (1 + LOST) * (taken + self.activations(tokens))

    def learning(self, rank: int, where: str, optimizer: str, size: int) -> float:
        """Bytes of adapters, gradients and optimizer."""
        return self.adapters(rank, where) * ((2 + STATES[optimizer]) * size + BYTE_STATES[optimizer])

    def largest(self, memory: float, tokens: int, **how: object) -> str | float | None:
        """The largest budget with which a GPU of that many bytes trains it: "off", bytes, "all"; None: none does."""
        left = memory - CONTEXT - self.training(tokens, 0.0, **how)  # type: ignore[arg-type]
        budget = left / (1 + LOST)
        if budget >= self.experts_in("off"):
            return "off"
        least = self.experts_in("all")
        whole = budget // 2**30 * 2**30
        return None if budget < least else whole if whole >= least + PACKED * self.unit else "all"


def repeated(
    layers: int, hidden: int, heads: int, keys: int, head: int, alike: bool = False
) -> tuple[tuple[int, int, int], ...]:
    """The projections of attention; ``alike``: keys are values."""
    outer, inner = heads * head, keys * head
    return (outer, hidden, layers), (inner, hidden, (2 - alike) * layers), (hidden, outer, layers)


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(
        48, 48, 2048, 768, 128, 8, 151936, repeated(48, 2048, 32, 4, 128),
        dense=48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048,
    ),
    "gpt-oss-20b": Mixture(
        24, 24, 2880, 2880, 32, 4, 201088, repeated(24, 2880, 64, 8, 64),
        dense=24 * (64 + 64 * (64 + 8 + 8) + 2880 + 32 * 2880 + 32 + 32 * 3 * 2880 + 2 * 2880) + 2880, widths=14, scores=64 * 2,
    ),
    "Gemma-4-26B-A4B": Mixture(
        30, 30, 2816, 704, 128, 8, 262144, (*repeated(25, 2816, 16, 8, 256), *repeated(5, 2816, 16, 2, 512, alike=True)),
        linear=30 * (3 * 2816 * 2112 + 128 * 2816), tied=True,
        dense=30 * (8 * 2816 + 128) + 2 * (25 * 256 + 5 * 512) + 2816,
    ),
    "GLM-4.5-Air": Mixture(
        46, 45, 4096, 1408, 128, 8, 151552, repeated(46, 4096, 96, 8, 128),
        linear=3 * 4096 * (10944 + 45 * 1408), dense=46 * (128 * (96 + 8 + 8) + 2 * 4096) + 45 * 2 * 128 * 4096 + 4096,
    ),
}  # fmt: skip
