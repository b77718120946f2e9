"""Where a replacement is: put in place and taken out again, whoever else replaces the same functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from .counters import warn_once
from .state import State
from .target import ANY, Target

ABSENT = object()
HELD: Any = vars(ModuleType)["__dict__"]  # the globals of a module, with no code of its class
Place = tuple[Any, str]  # a module, class or dict, and the name there


class Pair(NamedTuple):
    """A function that was found at a target's name, and its replacement."""

    original: Callable[..., Any]
    replacement: Callable[..., Any]


@dataclass
class Installed:
    """A target whose module is imported: its replacements and their places, or why there is none.

    Another library may put its own function at the name, which gets a replacement of its own. Copies of the first original
    stay with the first replacement, so there is a pair for each. The last pair is the one of the latest ``enable()``.
    """

    target: Target
    pairs: list[Pair] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    swapped: bool | None = None  # the way of the latest swap; None: it was interrupted, or there is another pair since
    refused: Any = ABSENT  # the function that cannot be replaced
    refusal: str = ""  # why not

    @property
    def original(self) -> Callable[..., Any] | None:
        return self.pairs[-1].original if self.pairs else None

    @property
    def replacement(self) -> Callable[..., Any] | None:
        return self.pairs[-1].replacement if self.pairs else None

    def current(self) -> Any:
        """What stands at the target's name. Its module may have been imported again."""
        return get_attr(*self.target.holder(sys.modules.get(self.target.module)))

    def state(self) -> State:
        """PATCHED, WRAPPED, DISPLACED or REFUSED."""
        current = self.current()
        pair = self.pair_of(current)
        if pair is not None and current is not pair.original:
            return State.PATCHED if current is pair.replacement else State.WRAPPED
        return State.REFUSED if not self.pairs or current is self.refused else State.DISPLACED

    def why_displaced(self) -> str:
        """What to do about the function that stands there instead of ours."""
        if why := refusal_of(self.target, self.current()):
            return f"another library put its own function there, which cannot be replaced: {why}"
        return "another library put its own function there; enable() again to take it back"

    def pair_of(self, function: Any) -> Pair | None:
        """The pair whose original ``function`` is, or whose replacement it is or wraps."""
        return next((pair for pair in self.pairs if function is pair.original or is_wrapped_by(pair, function)), None)

    def refuse(self, function: Any, why: str) -> None:
        """Leave ``function`` alone. Copies of the functions that were there before are swapped as ever."""
        self.refused, self.refusal = function, why

    def use(self, pair: Pair, place: Place) -> None:
        """Make this the last pair, and ``place`` one of the places."""
        if pair not in self.pairs:
            self.swapped = None
        self.pairs = [*(each for each in self.pairs if each is not pair), pair]
        self.places += [place] if place not in self.places else []
        self.refused, self.refusal = ABSENT, ""

    def add_wrapped(self, function: Any) -> None:
        """A pair for each copied function that ``function`` wraps: it was copied before another library wrapped it."""
        while (function := getattr(function, "__wrapped__", None)) is not None:
            if copies(self.target, [function]) and not refusal_of(self.target, function):
                self.pairs.insert(0, Pair(function, self.target.make(function)))

    def swap(self, on: bool) -> None:
        """Put the replacements where the originals are, or the originals back, in every place and every copy."""
        current = self.current()
        if self.swapped is on and not any(current is pair[not on] for pair in self.pairs):
            return  # as the latest swap left it: 30 ms less for a target that is copied (2-core CPU machine, 3,700 modules)
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
    """Put the replacement in place, or only make it where its option is off."""
    place = target.holder(module)
    current = get_attr(*place, ABSENT)
    if (target.unless and hasattr(module, target.unless)) or current is ABSENT:
        return
    entry = installed[target.name] = installed.get(target.name) or Installed(target)
    pair = entry.pair_of(current)
    if pair is not None:
        entry.use(pair, place)
    else:
        original = current
        while is_ours(original):  # an earlier replacement, that somebody kept and put back
            original = original.__wrapped__
        if why := refusal_of(target, original):
            entry.refuse(current, why)
            warn_once(f"nf4_patch leaves {target.name} alone: {why}")
        else:
            known = [each for each in entry.pairs if each.original is original]
            entry.use(known[0] if known else Pair(original, target.make(original)), place)
            if current is not original:
                Installed(target, [Pair(original, current)], [place]).swap(on=False)
            if target.patch_copies and not known:
                entry.add_wrapped(original)
    entry.swap(on=wanted)


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


def refusal_of(target: Target, function: Any) -> str:
    """Why no replacement can be made of ``function``; "" where one can."""
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


def copies(target: Target, functions: list[Any]) -> list[Place]:
    """Every module global that holds one of these very objects: in the target's own package, elsewhere only under its own name.

    Under another name it is a copy that somebody keeps on purpose, to compare with or to put back.
    """
    own_name = target.name.rpartition(".")[2]
    wanted = set(map(id, functions))
    found: list[Place] = []
    for module_name, module in list(sys.modules.items()):
        kind = type(module)  # isinstance asks the object, and vars() would load a lazy module
        if issubclass(kind, ModuleType) and kind.__getattribute__ is ModuleType.__getattribute__:
            held = HELD.__get__(module)
            names = list(held) if module_name.split(".")[0] == target.library else [own_name]
            found += [(module, name) for name in names if id(held.get(name)) in wanted]
    return found


def is_wrapped_by(pair: Pair, function: Any) -> bool:
    """Whether ``function`` is the replacement, or holds it where a wrapper holds what it calls: see ``held_by``."""
    seen = {id(pair.original): pair.original}  # with the objects, so that no id comes twice
    waiting = [function]
    for current in waiting:
        if current is pair.replacement:
            return True
        if callable(current) and id(current) not in seen and len(seen) < 1000:
            seen[id(current)] = current
            waiting += held_by(current)
    return False


def held_by(function: Any) -> Iterator[Any]:
    """What a callable can call: its attributes, what a partial or a method binds, closure cells, defaults and named globals."""
    with contextlib.suppress(Exception):  # somebody else's attributes may raise anything
        yield getattr(function, "__wrapped__", None)
    owner = function.__self__ if isinstance(function, MethodType) else function
    if not isinstance(owner, (type, ModuleType)):
        with contextlib.suppress(Exception):
            yield from vars(owner).values()
        with contextlib.suppress(Exception):
            yield from (getattr(owner, name, None) for name in getattr(type(owner), "__slots__", ()))
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, MethodType):
        yield function.__func__
    elif isinstance(function, FunctionType):
        yield from (function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).values()
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
    else:
        yield vars(type(function)).get("__call__")
