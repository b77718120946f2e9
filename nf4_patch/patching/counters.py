"""Count the hits of each target (a replaced library function), and its fallbacks by Reason."""

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
    """NF4_PATCH_STRICT=1 is set, and a call with a 4-bit weight would have fallen back to the original function."""


class HitCounter:
    """Counts the kernel launches for one combination of target, weight shape, dtype and kernel."""

    __slots__ = ("addresses", "hits")

    def __init__(self) -> None:
        self.addresses: set[int] = set()  # addresses of the packed weights
        self.hits = 0  # ``hits += 1`` needs no lock, because CPython does not switch threads within it.


class Counters:
    """Counts all hits and fallbacks of the process, except for calls inside a compiled graph.

    Other threads may add entries at any time, so iterate over a copy of a dictionary.
    """

    def __init__(self) -> None:
        self.hit_counters: dict[tuple[str, tuple[int, ...], str, str], HitCounter] = {}
        self.fallbacks: Counter[tuple[str, Reason]] = Counter()
        self.uses: dict[str, HitCounter] = {}  # by option: calls that it handled without a kernel launch
        # how often each kernel failure, internal error or detail of a Reason occurred, by message
        self.errors: dict[str, int] = {}

    def of(self, target: str, shape: tuple[int, ...], dtype: str, kernel: str = "") -> HitCounter:
        """Return a HitCounter. ``kernel`` is "" for the dequantization kernel."""
        return self.hit_counters.setdefault((target, tuple(shape), dtype.removeprefix("torch."), kernel), HitCounter())

    def uses_of(self, option: str) -> HitCounter:
        return self.uses.setdefault(option, HitCounter())

    def anything(self) -> bool:
        return bool(self.fallbacks) or any(c.hits for c in [*self.hit_counters.values(), *self.uses.values()])

    def hits(self, target: str) -> int:
        return sum(counter.hits for (name, *_), counter in list(self.hit_counters.items()) if name == target)

    def fall_back(self, target: str, reason: Reason, strict: bool, detail: str = "") -> None:
        """Count a fallback. Warn at the target's first fallback for each Reason that is not ``is_expected``.

        ``detail`` is the message of an error, or details of the Reason.

        Raises:
            FallbackError: NF4_PATCH_STRICT=1 is set (``strict``), and the Reason is not expected.
        """
        first = (target, reason) not in self.fallbacks
        self.fallbacks[target, reason] += 1
        # Limit the number of stored messages, because a message with an address differs each time.
        message = f"{reason.name}: {detail}" if reason.is_expected else detail
        if detail and (message in self.errors or len(self.errors) < 100):
            self.errors[message] = self.errors.get(message, 0) + 1
        if reason.is_expected:
            return
        sentence = f"{target} runs the original ({reason.name}): {reason.sentence}" + (f" ({detail})" if detail else "")
        if reason.advice:
            sentence += f"; {reason.advice}"
        if strict:
            raise FallbackError(f"{sentence} (NF4_PATCH_STRICT=1)")
        if first:
            logger.warning("nf4_patch: %s. Further calls are only counted, see nf4_patch.status().", sentence)

    def reset(self) -> None:
        """Set all counts to zero. Launches hold the HitCounter objects, which stay."""
        for counter in [*self.hit_counters.values(), *self.uses.values()]:
            counter.hits = 0
        self.fallbacks.clear()
        self.errors.clear()


counters = Counters()
