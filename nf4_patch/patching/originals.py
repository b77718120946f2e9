"""Distinguish a library's own functions from functions that somebody else put in their place."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType
from typing import Any

from .module_hooks import is_written_in
from .placement import is_ours
from .target import Target
from .targets import LIBRARIES

# Functions that only return the dequantized weight to their own caller, keyed by module.
PASSED_ON = {"torch.utils._contextlib": "decorate_context"}
for library in LIBRARIES:
    PASSED_ON.update(library.relays)


def is_own(function: Any, module: str, *names: str) -> bool:
    """Return whether ``function`` is defined in ``module`` under one of ``names``, or is our replacement of that function.

    functools.wraps copies ``__name__`` and ``__module__``, so globals and code are read.
    """
    while is_ours(function) or is_passed_on(function):
        function = function.__wrapped__
    found = sys.modules.get(module)
    if type(function) is BuiltinFunctionType:
        return any(function is getattr(found, name, None) for name in names)
    if found is None or not is_written_in(found, function):
        return False
    while not is_written_here(function, module):
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return False
    return function.__code__.co_name in names


def is_passed_on(function: Any) -> bool:
    """Return whether ``function`` only calls the function that it wraps (PASSED_ON)."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    name = getattr(getattr(function, "__code__", None), "co_name", "")
    return PASSED_ON.get(module) == name and hasattr(function, "__wrapped__")


def is_written_here(function: Any, module: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.replace("\\", "/").endswith(f"{module.replace('.', '/')}.py")


def replaced(target: Target, original: Any) -> str:
    """Return the name of a function that somebody else replaced and whose work the target's replacement does itself, or "".

    ``original`` is the function at the target's name.
    """
    if target.own and not is_own(original, target.module, *target.own):
        return target.name
    for path in target.computes:
        module, _, name = path.partition(":")
        function = getattr(sys.modules.get(module), name, None)
        if function is not None and not is_own(function, module, name):
            return f"{module}.{name}"
    return ""
