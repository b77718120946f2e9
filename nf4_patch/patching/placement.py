"""Put replacements in place and take them out again, even if other libraries replace or wrap the same functions."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ..version import holds, release_of
from .counters import warn_once
from .state import State
from .target import ANY, Target

ABSENT = object()
# HELD reads a module's globals. Unlike vars(), it runs no code of a subclass of ModuleType.
HELD: Any = vars(ModuleType)["__dict__"]
Place = tuple[Any, str]  # a module, class or dict, and a name in it


class Pair(NamedTuple):
    original: Callable[..., Any]
    replacement: Callable[..., Any]


@dataclass
class Installed:
    """A target's replacements and their places, or the function that cannot be replaced.

    There are several pairs if another library put its own function at the target's name while other modules still hold
    the first original. The last pair belongs to the function that the latest ``enable()`` found there.
    """

    target: Target
    pairs: list[Pair] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    # the argument ``on`` of the latest ``swap``; None if that swap was interrupted, or if a pair was added after it
    swapped: bool | None = None
    refused: Any = ABSENT  # the function that cannot be replaced

    @property
    def refusal(self) -> bool:
        """Return whether nf4_patch could not replace the function that the latest ``enable()`` or import found."""
        return self.refused is not ABSENT

    @property
    def original(self) -> Callable[..., Any] | None:
        return self.pairs[-1].original if self.pairs else None

    @property
    def replacement(self) -> Callable[..., Any] | None:
        return self.pairs[-1].replacement if self.pairs else None

    def current(self) -> Any:
        """Return the function under the target's name, even after a reload."""
        return get_attr(*self.target.holder(sys.modules.get(self.target.module)))

    def state(self) -> State:
        """Return PATCHED, WRAPPED, DISPLACED or REFUSED."""
        current = self.current()
        pair = self.pair_of(current)
        if pair is not None and current is not pair.original:
            return State.PATCHED if current is pair.replacement else State.WRAPPED
        return State.REFUSED if not self.pairs or current is self.refused else State.DISPLACED

    def pair_of(self, function: Any) -> Pair | None:
        """Return the pair whose original, replacement or wrapped replacement is ``function``, or None."""
        return next((pair for pair in self.pairs if function is pair.original or is_wrapped_by(pair, function)), None)

    def refuse(self, function: Any) -> None:
        """Record that ``function``, which is now at the target's name, cannot be replaced.

        The pairs of earlier functions stay, so that ``swap`` still replaces these functions where other modules hold
        them.
        """
        self.refused = function

    def use(self, pair: Pair, place: Place) -> None:
        """Make ``pair`` the last pair, and record the place."""
        if pair not in self.pairs:
            self.swapped = None
        self.pairs = [*(each for each in self.pairs if each is not pair), pair]
        self.places += [place] if place not in self.places else []
        self.refused = ABSENT

    def add_wrapped(self, function: Any) -> None:
        """Follow ``__wrapped__``, and add a Pair for each function that a module imported by name before it was wrapped."""
        while (function := getattr(function, "__wrapped__", None)) is not None:
            if copies(self.target, [function]) and not unsupported(self.target, function):
                self.pairs.insert(0, Pair(function, self.target.make(function)))

    def swap(self, on: bool) -> None:
        """Put the replacements in all places if ``on``, else the originals.

        With ``patch_copies``, the places include the copies of the function in other modules.
        """
        current = self.current()
        if self.swapped is on and not any(current is pair[not on] for pair in self.pairs):
            # Nothing is left to swap. The search for copies would take 3 ms (2-core CPU machine, 3,700 modules).
            return
        self.swapped = None
        if self.target.patch_copies:
            functions = [function for pair in self.pairs for function in pair]
            self.places += [place for place in copies(self.target, functions) if place not in self.places]
        for pair in self.pairs:
            old, new = pair if on else (pair.replacement, pair.original)
            for holder, name in self.places:
                if get_attr(holder, name) is old:
                    put(holder, name, new)
        held = {id(get_attr(*place)) for place in self.places}
        self.pairs = [each for each in self.pairs if each is self.pairs[-1] or held & set(map(id, each))]
        self.swapped = on


installed: dict[str, Installed] = {}


def install(target: Target, module: ModuleType, wanted: bool) -> None:
    """Make the target's replacement, and put it in place if ``wanted``."""
    place = target.holder(module)
    current = get_attr(*place, ABSENT)
    if (target.unless and hasattr(module, target.unless)) or current is ABSENT:
        return
    if target.name not in installed and not is_in_release(target):
        return
    entry = installed[target.name] = installed.get(target.name) or Installed(target)
    pair = entry.pair_of(current)
    if pair is not None:
        entry.use(pair, place)
    else:
        original = current
        while is_ours(original):  # another library saved an earlier replacement and put it back
            original = original.__wrapped__
        if found := unsupported(target, original):
            entry.refuse(current)
            warn_once(f"nf4_patch does not replace {target.name}: {target.mismatch(found)}")
        else:
            known = [each for each in entry.pairs if each.original is original]
            entry.use(known[0] if known else Pair(original, target.make(original)), place)
            if current is not original:
                Installed(target, [Pair(original, current)], [place]).swap(on=False)
            if target.patch_copies and not known:
                entry.add_wrapped(original)
    entry.swap(on=wanted)


def is_in_release(target: Target) -> bool:
    """Return whether the library's installed release is in ``Target.releases``.

    An older release may call the function in another way.
    """
    release = release_of(target.library)  # None for a checkout on PYTHONPATH
    return release is None or holds(release, target.releases)


def is_of_an_earlier_import(target: Target) -> bool:
    """Return whether the function is a replacement from an earlier import of this package."""
    function = get_attr(*target.holder(sys.modules.get(target.module)))
    return is_ours(function) and function.__nf4_patch__[1] is not Target


def get_attr(holder: Any, name: str, default: Any = None) -> Any:
    """Return the value that a module, class or dict holds under ``name``. For a class method, return its function."""
    if isinstance(holder, dict):
        return holder.get(name, default)
    value = getattr(holder, name, default)
    return value.__func__ if isinstance(holder, type) and isinstance(value, MethodType) else value


def put(holder: Any, name: str, function: Any) -> None:
    """Set ``name`` in a module, dict or class to ``function``. A static or class method keeps its kind.

    If the class would inherit ``function`` under this name, delete the name from the class instead.
    """
    if isinstance(holder, dict):
        holder[name] = function
    elif isinstance(holder, type) and any(vars(base).get(name) is function for base in holder.__mro__[1:]):
        delattr(holder, name)
    else:
        kind = type(vars(holder).get(name))
        setattr(holder, name, kind(function) if kind in (staticmethod, classmethod) else function)


def is_ours(function: Any) -> bool:
    """Return whether this package, maybe before a reload, made ``function`` as a replacement."""
    mark = getattr(function, "__nf4_patch__", None)
    return isinstance(mark, tuple) and mark[0] is function


def unsupported(target: Target, function: Any) -> str:
    """Return "" if ``function`` can be replaced, else its parameters, or its type if it has no signature."""
    if target.parameters is ANY:
        return ""
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return type(function).__name__
    # ("A", "args", "kwargs") are the parameters of unsloth_zoo's wrapper.
    if parameters in target.parameters or parameters == ("A", "args", "kwargs"):
        return ""
    return f"({', '.join(parameters)})"


def copies(target: Target, functions: list[Any]) -> list[Place]:
    """Return the modules that hold one of ``functions`` in a global, with the global's name.

    In other libraries, the name must be the function's. A copy with another name is probably meant to stay the original,
    for example for a comparison.
    """
    own_name = target.name.rpartition(".")[2]
    wanted, library = set(map(id, functions)), target.library
    within = f"{library}."
    found: list[Place] = []
    for module_name, module in list(sys.modules.items()):
        kind = type(module)  # isinstance() and vars() would run code of a lazy module
        if kind is ModuleType:
            held = module.__dict__
        elif issubclass(kind, ModuleType) and kind.__getattribute__ is ModuleType.__getattribute__:
            held = HELD.__get__(module)
        else:
            continue
        if module_name == library or module_name.startswith(within):
            found += [(module, name) for name, value in list(held.items()) if id(value) in wanted]
        elif own_name in held and id(held.get(own_name)) in wanted:
            found.append((module, own_name))
    return found


def is_wrapped_by(pair: Pair, function: Any) -> bool:
    """Return whether ``function`` is, or might call, the pair's replacement."""
    seen = {id(pair.original): pair.original}  # ``seen`` keeps the functions alive, so that no id is reused
    waiting = [function]
    for current in waiting:
        if current is pair.replacement:
            return True
        if id(current) not in seen and len(seen) < 1000:
            seen[id(current)] = current
            waiting += functions_in(current)
    return False


def functions_in(function: Any) -> Iterator[Any]:
    """Yield the functions that a wrapper holds as ``__wrapped__``, in closure cells and in the globals that it names.

    Unsloth (2026.10.9) wraps seven methods of transformers and peft without ``__wrapped__``.
    """
    with contextlib.suppress(Exception):  # attributes of other libraries' objects may raise any error
        yield function.__wrapped__
    if isinstance(function, FunctionType):
        held = [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                held.append(cell.cell_contents)
        yield from (each for each in held if isinstance(each, FunctionType))
