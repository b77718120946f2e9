"""The LoRA adapters that the next forward of the experts applies."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from .product import Lora


class Wrapper(Protocol):
    """One running forward of a LoRA wrapper around a stack of experts."""

    experts: Any  # the experts module
    name: str  # of the stack in the module
    is_asked: bool  # whether the forward of the experts uses the LoRA factors

    def factors(self) -> Lora: ...


class ActiveWrappers(threading.local):
    """The wrappers that are running in this thread.

    Each of these forwards applies its LoRA factors only once, in the first forward of the experts.
    """

    wrappers: tuple[Wrapper, ...] = ()

    def of(self, experts: Any) -> list[Wrapper]:
        """Return the running wrappers of an experts module whose LoRA factors were not used yet."""
        return [each for each in self.wrappers if each.experts is experts and not each.is_asked]


active_wrappers = ActiveWrappers()
