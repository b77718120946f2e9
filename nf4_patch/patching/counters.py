"""Hits and fallbacks, by target: what ran in the kernel, what ran the original, and why."""

from __future__ import annotations

import functools
import logging
from collections import Counter

from .reasons import Reason

logger = logging.getLogger("nf4_patch")


@functools.cache
def warn_once(sentence: str) -> None:
    logger.warning(sentence)


class FallbackError(RuntimeError):
    """NF4_PATCH_STRICT=1 and a 4-bit weight would have run the original."""


class HitCounter:
    """Kernel launches of one target, weight shape, dtype and kernel."""

    __slots__ = ("addresses", "hits")

    def __init__(self) -> None:
        self.addresses: set[int] = set()  # of the packed weights
        self.hits = 0  # ``+= 1`` has no call inside it: CPython does not switch threads in the middle


class Counters:
    """All counts of the process, read over ``list(...)``: other threads add meanwhile. Calls in a compiled graph are not seen."""

    def __init__(self) -> None:
        self.hit_counters: dict[tuple[str, tuple[int, ...], str, str], HitCounter] = {}
        self.fallbacks: Counter[tuple[str, Reason]] = Counter()
        self.errors: dict[str, int] = {}  # kernel failures and own errors, by message

    def of(self, target: str, shape: tuple[int, ...], dtype: str, kernel: str = "") -> HitCounter:
        """``kernel``: which one, where it is not the dequantization."""
        return self.hit_counters.setdefault((target, tuple(shape), dtype.removeprefix("torch."), kernel), HitCounter())

    def hits(self, target: str) -> int:
        return sum(counter.hits for (name, *_), counter in list(self.hit_counters.items()) if name == target)

    def fall_back(self, target: str, reason: Reason, strict: bool, detail: str = "") -> None:
        """Count it; the first of its kind is a WARNING.

        Raises:
            FallbackError: strict, and the weight was a 4-bit one.
        """
        first = (target, reason) not in self.fallbacks
        self.fallbacks[target, reason] += 1
        if detail and (detail in self.errors or len(self.errors) < 100):  # a message may hold an address
            self.errors[detail] = self.errors.get(detail, 0) + 1
        if reason.is_expected:
            return
        sentence = f"{target} runs the original ({reason.name}): {reason.sentence}" + (f" ({detail})" if detail else "")
        if reason.advice:
            sentence += f"; {reason.advice}"
        if strict:
            raise FallbackError(f"{sentence} (NF4_PATCH_STRICT=1)")
        if first:
            logger.warning("nf4_patch: %s. Further calls are only counted: see nf4_patch.status().", sentence)

    def reset(self) -> None:
        """Forget the counts; launches that are remembered keep their counters."""
        for counter in list(self.hit_counters.values()):
            counter.hits = 0
        self.fallbacks.clear()
        self.errors.clear()


counters = Counters()
