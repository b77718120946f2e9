"""What a row of ``TARGETS`` says, and what rows of several options share."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PACKAGE = __name__.partition(".")[0]
# A release's parameter names; a function with others is left alone, by name.
Parameters = tuple[str, ...]
ANY: tuple[Parameters, ...] = ()  # of a function that is written in C, whose parameters cannot be read


@dataclass(frozen=True)
class OwnKernel:
    """A fused kernel of the library's own. Code that is compiled keeps it everywhere: Inductor launches it without the
    dispatcher that our op goes through."""

    used: str  # the global of the row's module that says whether the library uses it
    releases: str
    slower_on: tuple[tuple[int, int], ...]  # capabilities where it was measured to be slower than eager calls of ours
    advice: str

    def in_use(self, module: str) -> bool:
        return bool(getattr(sys.modules.get(module), self.used, False))

    def keeps_eager_calls(self) -> bool:
        """Whether it was not measured to be slower on every GPU here."""
        return not _slower_everywhere(self.slower_on)


@functools.cache
def _slower_everywhere(slower_on: tuple[tuple[int, int], ...]) -> bool:
    import torch

    from ..nf4.runtime import capability_of

    capabilities = map(capability_of, range(torch.cuda.device_count()))
    return all(capability in slower_on for capability in capabilities)


@dataclass(frozen=True)
class Target:
    """One function of one module."""

    function: str  # "module:attribute", dotted for a static method of a class, or an entry of a dict of one
    releases: str  # which have it, ">= 1.0" or "<= 1.0"; "": all
    tested: tuple[str, ...]  # releases that the tests ran with
    parameters: tuple[Parameters, ...]  # the signatures that the replacement adapts
    replace: str  # "module:function", of this package ".module:function": makes the replacement of (row, original)
    covers: str
    unless: str = ""  # an attribute of the module that makes this row void
    option: str = ""  # an option: in place only where that is switched on
    or_option: str = ""  # another option that puts it in place too
    lazy: bool = False  # its package imports the module only when it is used
    after: str = ""  # installed when this module is imported, and not with its own
    uncounted: str = ""  # what ``status()`` says of a row whose calls are neither hits nor fallbacks
    permanent: bool = False  # stays in place whatever is switched off: what an option has made may outlive the option
    readers: str = ""  # a module, or "package.", whose code only reads the result: the cache serves its calls
    patch_copies: bool = False  # other modules hold the function by value: replace the copies too
    own_kernel: OwnKernel | None = None  # the library's, which keeps calls that ours was not measured to run faster

    @functools.cached_property
    def name(self) -> str:
        return self.function.replace(":", ".")

    @functools.cached_property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @functools.cached_property
    def library(self) -> str:
        """The package, and the name of its distribution."""
        return self.module.partition(".")[0]

    @property
    def trigger(self) -> str:
        """The module whose import installs the row."""
        return self.after or self.module

    def holder(self, module: Any) -> tuple[Any, str]:
        """The module, class or dict that holds the function (None if there is none), and its name there."""
        *classes, name = self.function.partition(":")[2].split(".")
        for each in classes:
            module = getattr(module, each, None)
        return module, name

    def make(self, original: Callable[..., Any]) -> Any:
        """The replacement, marked as ours: see placement.is_ours."""
        module, function = self.replace.split(":")
        replacement: Any = getattr(importlib.import_module(module, PACKAGE), function)(self, original)
        replacement.__nf4_patch__ = replacement, Target  # itself: functools.wraps copies attributes to a wrapper
        return replacement


SECOND_LEVEL = ("absmax_8bit", "absmax_code", "absmax_offset")
LINEAR_4BIT = (("A", "B", "shapeB", "absmax", "blocksize", "quant_type", "bias", *SECOND_LEVEL),)
# Releases that scripts/release_matrix.py ran; docs/data/releases.json says on which machine.
TESTED_OP = ("0.50.2",)
TESTED_UNSLOTH = ("2026.9.7", "2026.10.9")
TESTED_LOADING = ("5.17.0", "5.23.0", "5.24.0")
