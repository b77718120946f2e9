"""Count hits and fallbacks per target, with the Reason of each fallback."""

from __future__ import annotations

import functools
import logging
from collections import Counter

from .reasons import Reason

logger = logging.getLogger("nf4_patch")


@functools.cache
def warn_once(sentence: str) -> None:
    """Log a warning. The same sentence is logged only once."""
    logger.warning(sentence)


class FallbackError(RuntimeError):
    """With NF4_PATCH_STRICT=1, a 4-bit weight would have fallen back to the original function."""


class HitCounter:
    """Number of kernel launches for one target, weight shape, dtype and kernel."""

    __slots__ = ("addresses", "hits")

    def __init__(self) -> None:
        self.addresses: set[int] = set()  # addresses of the packed weights
        self.hits = 0  # ``+= 1`` makes no call, so CPython does not switch threads in the middle of it


class Counters:
    """All hits and fallbacks of the process. Calls inside a compiled graph are not counted.

    Iterate over copies of the dictionaries, ``list(...)``, because other threads may add entries.
    """

    def __init__(self) -> None:
        self.hit_counters: dict[tuple[str, tuple[int, ...], str, str], HitCounter] = {}
        self.fallbacks: Counter[tuple[str, Reason]] = Counter()
        self.errors: dict[str, int] = {}  # how often each kernel failure or internal error occurred, by message

    def of(self, target: str, shape: tuple[int, ...], dtype: str, kernel: str = "") -> HitCounter:
        """Return the counter of a target, weight shape and dtype. ``kernel`` names the kernel if it is not the dequantization."""
        return self.hit_counters.setdefault((target, tuple(shape), dtype.removeprefix("torch."), kernel), HitCounter())

    def hits(self, target: str) -> int:
        return sum(counter.hits for (name, *_), counter in list(self.hit_counters.items()) if name == target)

    def fall_back(self, target: str, reason: Reason, strict: bool, detail: str = "") -> None:
        """Count a fallback. Log a warning if it is the target's first fallback for this Reason.

        A Reason that is expected (``Reason.is_expected``) is only counted.

        Raises:
            FallbackError: in strict mode, if the Reason is not expected.
        """
        first = (target, reason) not in self.fallbacks
        self.fallbacks[target, reason] += 1
        # At most 100 messages are stored, because messages that contain addresses differ each time.
        if detail and (detail in self.errors or len(self.errors) < 100):
            self.errors[detail] = self.errors.get(detail, 0) + 1
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
        """Set all counts to zero. The HitCounter objects stay in use, because launches refer to them."""
        for counter in list(self.hit_counters.values()):
            counter.hits = 0
        self.fallbacks.clear()
        self.errors.clear()


counters = Counters()
