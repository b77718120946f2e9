"""The LoRA adapters that the next forward of the experts applies."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from .product import Lora


class Wrapper(Protocol):
    """A LoRA wrapper around a stack of experts, while the wrapper's forward runs."""

    experts: Any  # the experts module
    name: str  # the stack's name in the module
    is_asked: bool  # whether the forward of the experts has taken the LoRA factors

    def factors(self) -> Lora: ...


class ActiveWrappers(threading.local):
    """The LoRA wrappers whose forwards are running in this thread.

    Only the first forward of the experts inside a wrapper's forward applies the wrapper's LoRA factors.
    """

    wrappers: tuple[Wrapper, ...] = ()

    def of(self, experts: Any) -> list[Wrapper]:
        """Return the running wrappers around ``experts`` whose LoRA factors were not taken yet."""
        return [each for each in self.wrappers if each.experts is experts and not each.is_asked]


active_wrappers = ActiveWrappers()
