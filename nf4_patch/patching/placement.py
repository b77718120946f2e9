"""Where a replacement is: put in place and taken out again, whoever else replaces the same functions."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .state import State
from .target import ANY, Target

logger = logging.getLogger("nf4_patch")
ABSENT = object()
HELD: Any = vars(ModuleType)["__dict__"]  # the globals of a module, with no code of its class


@dataclass
class Installed:
    """A target whose module is imported: the replacement and its places, or why there is none."""

    target: Target
    original: Callable[..., Any] | None = None
    replacement: Callable[..., Any] | None = None
    places: list[tuple[Any, str]] = field(default_factory=list)
    refusal: str = ""

    def state(self) -> State:
        """PATCHED, WRAPPED, DISPLACED or REFUSED."""
        if self.replacement is None:
            return State.REFUSED
        # not places[0]: the module may have been imported again
        holder, name = self.target.holder(sys.modules.get(self.target.module))
        current = get_attr(holder, name)
        if current is self.replacement:
            return State.PATCHED
        return State.WRAPPED if is_wrapped_by(self.replacement, current) else State.DISPLACED

    def swap(self, old: Any, new: Any) -> None:
        """Put ``new`` wherever ``old`` is, and in a copied target's place wherever it was copied to meanwhile."""
        if not any(get_attr(holder, name) is old for holder, name in self.places):
            return
        if self.target.copied:  # every global of 3,000 modules: 35 ms (2-core CPU machine, busy)
            self.places += [place for place in copies(self.target, old) if place not in self.places]
        for holder, name in self.places:
            if get_attr(holder, name) is old:
                put(holder, name, new)


installed: dict[str, Installed] = {}


def install(target: Target, module: ModuleType, wanted: bool) -> None:
    """Put the replacement in place, or only make it where its feature is switched off."""
    holder, name = target.holder(module)
    current = get_attr(holder, name, ABSENT)
    if (target.unless and hasattr(module, target.unless)) or current is ABSENT:
        return
    entry = installed.get(target.name)
    if entry is not None and entry.replacement is not None:
        if is_wrapped_by(entry.replacement, current):
            if not wanted:
                entry.swap(entry.replacement, entry.original)
            return  # in place, or under another library's wrapper: the switch has turned it on again
        if current is entry.original and (holder, name) in entry.places:
            if wanted:
                entry.swap(entry.original, entry.replacement)
            return
    found = current
    while is_ours(current):  # an earlier one, that somebody kept and put back
        current = current.__wrapped__
    refusal = _refusal(target, current)
    if refusal:
        installed[target.name] = Installed(target, refusal=refusal)
        logger.warning("nf4_patch leaves %s alone: %s", target.name, refusal)
        return
    replacement = target.make(current)
    places = [(holder, name)]
    if target.copied:
        places += [place for each in {found, current} for place in copies(target, each) if place not in places]
    for holder, name in places:
        put(holder, name, replacement)
    entry = installed[target.name] = Installed(target, current, replacement, places)
    if not wanted:
        entry.swap(replacement, current)


def is_of_an_earlier_import(target: Target) -> bool:
    """Whether a replacement stands there that an earlier import of this package made."""
    function = get_attr(*target.holder(sys.modules.get(target.module)))
    return is_ours(function) and function.__nf4_patch__[1] is not Target


def get_attr(holder: Any, name: str, default: Any = None) -> Any:
    """What a module, class or dict holds under a name."""
    return holder.get(name, default) if isinstance(holder, dict) else getattr(holder, name, default)


def put(holder: Any, name: str, function: Any) -> None:
    """Into a module or dict as it is, into a class as the method or static method that it replaces."""
    if isinstance(holder, dict):
        holder[name] = function
    elif isinstance(holder, type) and any(vars(base).get(name) is function for base in holder.__mro__[1:]):
        delattr(holder, name)  # it was inherited
    else:
        setattr(holder, name, staticmethod(function) if isinstance(vars(holder).get(name), staticmethod) else function)


def is_ours(function: Any) -> bool:
    """A replacement of this package, of an earlier import of it too (importlib.reload, IPython's autoreload)."""
    mark = getattr(function, "__nf4_patch__", None)
    return isinstance(mark, tuple) and mark[0] is function


def _refusal(target: Target, function: Any) -> str:
    if target.parameters is ANY:
        return ""
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"it is a {type(function).__name__} whose signature cannot be read"
    if parameters in target.parameters or parameters == ("A", "args", "kwargs"):  # unsloth_zoo's wrapper
        return ""
    allowed = " or ".join(f"({', '.join(names)})" for names in target.parameters)
    return f"its parameters are ({', '.join(parameters)}), and this release of nf4_patch adapts {allowed}"


def copies(target: Target, function: Any) -> list[tuple[ModuleType, str]]:
    """Every module global that holds this very object: in the target's own package, elsewhere only under its own name.

    Under another name it is a copy that somebody keeps on purpose, to compare with or to put back.
    """
    own_name = target.name.rpartition(".")[2]
    found = []
    for module_name, module in list(sys.modules.items()):
        kind = type(module)  # isinstance asks the object, and vars() would load a lazy module
        if issubclass(kind, ModuleType) and kind.__getattribute__ is ModuleType.__getattribute__:
            held = HELD.__get__(module)
            names = list(held) if module_name.split(".")[0] == target.library else [own_name]
            found += [(module, name) for name in names if held.get(name) is function]
    return found


def is_wrapped_by(wanted: Any, function: Any) -> bool:
    """Whether ``function`` is or wraps ``wanted``: by __wrapped__, a partial, a method or a closure cell."""
    seen: set[int] = set()
    waiting = [function]
    while waiting and len(seen) < 1000:
        current = waiting.pop()
        if current is wanted:
            return True
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        waiting += [getattr(current, name, None) for name in ("__wrapped__", "__func__")]
        if isinstance(current, functools.partial):
            waiting.append(current.func)
        for cell in getattr(current, "__closure__", None) or ():
            try:
                if callable(cell.cell_contents):
                    waiting.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
    return False
