"""The row type of the table ``TARGETS``, and values that rows of several options share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PACKAGE = __name__.partition(".")[0]
Parameters = tuple[str, ...]  # the parameter names of a function in one release
ANY: tuple[Parameters, ...] = ()  # for functions written in C, whose parameters cannot be read
ALWAYS = "always"  # an ``option`` that is never off


@dataclass(frozen=True)
class Target:
    """A library function that nf4_patch replaces: one row of the table ``TARGETS``.

    Attributes:
        function: "module:attribute". The attribute may be dotted: a method of a class, or an entry of a class's dict.
        releases: releases of the library that have the function, ">= 1.0" or "<= 1.0".
        tested: releases that the tests ran with.
        parameters: parameter names that the replacement supports. A function with other names is not patched.
        replace: the function that makes the replacement, as "module:function" relative to this package, for example
            ".adapters.unsloth:fast_dequantize". It gets the row and the original, and returns the replacement.
        covers: the calls that the replacement speeds up, or its purpose. Shown by ``nf4-patch doctor -v`` and in the docs.
        option: the option that has to be on. "": no option, only the patch has to be on. ALWAYS: the replacement stays
            in place when the patch is turned off, because models with packed experts still need it.
        or_option: a second option. The replacement is used if one of the two options is on.
        unless: an attribute of the module. Where it exists, this row is skipped.
        after: a module. The row is installed when this module is imported, instead of the function's own module.
        uncounted: the note that ``status()`` shows if calls of the function are not counted as hits.
        patch_copies: also replace the function in modules that imported it by name.
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

    @functools.cached_property
    def name(self) -> str:
        return self.function.replace(":", ".")

    @functools.cached_property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @functools.cached_property
    def library(self) -> str:
        """Return the top-level package, which is also the name of its distribution."""
        return self.module.partition(".")[0]

    @property
    def trigger(self) -> str:
        """Return the module whose import installs the row."""
        return self.after or self.module

    @property
    def permanent(self) -> bool:
        """Return whether the replacement stays in place when the patch is turned off."""
        return self.option == ALWAYS

    def holder(self, module: Any) -> tuple[Any, str]:
        """Return the module, class or dict that holds the function (None if it is missing), and the function's name in it."""
        *classes, name = self.function.partition(":")[2].split(".")
        for each in classes:
            module = getattr(module, each, None)
        return module, name

    def make(self, original: Callable[..., Any]) -> Any:
        """Return the replacement of ``original``, marked for ``placement.is_ours``."""
        module, function = self.replace.split(":")
        replacement: Any = getattr(importlib.import_module(module, PACKAGE), function)(self, original)
        # When another library wraps the replacement, functools.wraps copies this mark to the wrapper. The mark holds
        # the replacement, so that ``is_ours`` can tell the replacement from the wrapper.
        replacement.__nf4_patch__ = replacement, Target
        return replacement


SECOND_LEVEL = ("absmax_8bit", "absmax_code", "absmax_offset")
LINEAR_4BIT = (("A", "B", "shapeB", "absmax", "blocksize", "quant_type", "bias", *SECOND_LEVEL),)
# Each TESTED_ constant holds the releases that scripts/release_matrix.py ran. docs/data/releases.json lists the machines.
TESTED_OP = ("0.50.2",)
TESTED_UNSLOTH = ("2026.9.7", "2026.10.9")
TESTED_LOADING = ("5.17.0", "5.23.0", "5.24.0")
