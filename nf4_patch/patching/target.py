"""The class of a row in ``TARGETS``, the table of library functions to replace."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PACKAGE = __name__.partition(".")[0]
Parameters = tuple[str, ...]  # the parameter names of a function in one release
ANY: tuple[Parameters, ...] = ()  # for a function written in C, whose parameters cannot be read
ALWAYS = "always"  # an ``option`` that is never off


def function_at(place: str) -> Any:
    """Return the function at "module:function", relative to this package."""
    module, function = place.split(":")
    return getattr(importlib.import_module(module, PACKAGE), function)


@dataclass(frozen=True)
class Target:
    """A library function that nf4_patch replaces, as one row of the table ``TARGETS``.

    Attributes:
        function: "module:attribute". A dotted attribute is a method of a class, or an entry of a dict in a class.
        releases: releases of the library that have the function, such as ">= 1.0". In others, it is not patched.
        tested: releases that the tests ran with.
        parameters: lists of supported parameter names. A function with other names is not patched.
        replace: the function that makes the replacement from the row and the original, as "module:function" relative to
            this package, for example ".libraries.unsloth.adapters:fast_dequantize".
        covers: the calls that get faster, or the purpose. Shown by ``nf4-patch doctor -v`` and in the docs.
        option: the option that has to be on. "" means only the patch. ALWAYS means that the replacement stays in place when
            the patch is turned off, because models with packed experts still need it.
        or_option: a second option, which is enough too.
        unless: an attribute. If the function's module has it, the row is skipped.
        after: the module whose import installs the row, if not the function's own.
        uncounted: the note in ``status()`` if the function's calls are not counted as hits.
        patch_copies: also replace the function in modules that imported it by name.
        own: for a replacement that computes the result itself, the possible names of the function in the library's source.
            If somebody else put another function in its place, that function runs (Reason.REPLACED). Empty for
            dequantizations, because all of them compute the same result.
        rows: the most rows that the function supports, if the fused matmul is timed against it.
        timed: the function that calls the original to time it, in the format of ``replace``. It takes the original,
            x [m, k], the PackedWeight and the QuantState.
        required: whether the option needs the row, and therefore its library.
        computes: further library functions that the replacement computes itself, as "module:attribute".
    """

    function: str
    releases: str
    tested: tuple[str, ...]
    parameters: tuple[Parameters, ...]
    replace: str
    covers: str
    option: str = ""
    or_option: str = ""
    unless: str = ""
    after: str = ""
    uncounted: str = ""
    patch_copies: bool = False
    own: tuple[str, ...] = ()
    rows: int = 0
    timed: str = ""
    required: bool = True
    computes: tuple[str, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return self.function.replace(":", ".")

    @functools.cached_property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @functools.cached_property
    def library(self) -> str:
        return self.module.partition(".")[0]

    @property
    def trigger(self) -> str:
        return self.after or self.module

    @property
    def permanent(self) -> bool:
        return self.option == ALWAYS

    def holder(self, module: Any) -> tuple[Any, str]:
        """Return the module, class or dict (or None) that holds the function, and the function's name in it."""
        *classes, name = self.function.partition(":")[2].split(".")
        for each in classes:
            module = getattr(module, each, None)
        return module, name

    def mismatch(self, found: str) -> str:
        """Describe the parameters ``found``, which are not supported."""
        allowed = " or ".join(f"({', '.join(names)})" for names in self.parameters)
        return f"found {found}, but this release of nf4_patch supports {allowed}"

    def make(self, original: Callable[..., Any]) -> Any:
        """Return the replacement of ``original``, marked for ``placement.is_ours``."""
        replacement: Any = function_at(self.replace)(self, original)
        # ``is_ours`` recognizes the replacement by this mark. functools.wraps copies the mark to a wrapper, so the mark
        # also names the replacement, which tells the wrapper apart.
        replacement.__nf4_patch__ = replacement, Target
        return replacement
