"""Putting the replacements in place and taking them out, whatever the import order."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from ..config import Config
from .targets import TARGETS, Target

logger = logging.getLogger("nf4_patch")


@dataclass
class Installed:
    """A target whose module is imported: what stands there and where, or why nothing does."""

    target: Target
    original: Callable[..., Any] | None = None
    replacement: Callable[..., Any] | None = None
    places: list[tuple[Any, str]] = field(default_factory=list)
    refusal: str = ""

    def state(self) -> str:
        """patched, wrapped (another library's function stands over ours), displaced (by one without ours), refused."""
        if self.replacement is None:
            return "refused"
        # not places[0]: the module may have been imported anew
        holder, name = self.target.holder(sys.modules.get(self.target.module))
        current = held(holder, name)
        if current is self.replacement:
            return "patched"
        return "wrapped" if reaches(current, self.replacement) else "displaced"

    def swap(self, old: Any, new: Any) -> None:
        """Put ``new`` wherever ``old`` stands, and in a copied target's place wherever it was copied to meanwhile."""
        if not any(held(holder, name) is old for holder, name in self.places):
            return
        if self.target.copied:  # every global of 3,000 modules: 35 ms (2-core CPU machine, busy)
            self.places += [place for place in _copies(old) if place not in self.places]
        for holder, name in self.places:
            if held(holder, name) is old:
                put(holder, name, new)


Options = tuple[str | None, str | int | None]  # matmul and cache, as they were given

installed: dict[str, Installed] = {}
_blocks: list[list[Options]] = []  # of each ``with enabled()`` that is entered
_outside: tuple[bool, Options] = (False, (None, None))  # enabled and with what, before the first of them
ABSENT = object()
_lock = threading.RLock()  # never held while waiting for another thread's import, which takes it in _on_import
_hooked = False
_enabled = False
_options: Options = (None, None)


def enable(matmul: str | None = None, cache: str | int | None = None) -> bool:
    """Replace every target, now or when its module is imported: see :func:`nf4_patch.enable`."""
    on = _switch_on((matmul, cache))
    _finish_imports()
    return on


def _switch_on(options: Options) -> bool:
    global _hooked, _enabled, _options
    config = Config.read(None, *options)
    if config.forbidden:
        disable()
        return False
    with _lock:
        _enabled, _options = True, options
        if "torch" in sys.modules:
            _set_switch(config)
        if not _hooked:
            _hooked = True
            for target in TARGETS:
                # wrapt calls the hook at once where the module is imported already.
                wrapt.register_post_import_hook(functools.partial(_on_import, target), target.module)
        _install_all()
        logger.info("nf4_patch is on: %s", ", ".join(n for n, i in installed.items() if i.replacement) or "waiting")
    return True


def _install_all() -> None:
    with _lock:
        for target in TARGETS:
            if target.module in sys.modules:
                _on_import(target, sys.modules[target.module])


def _finish_imports() -> None:
    """Wait until other threads have imported what is patched: a hook registered in the middle of an import does not fire.

    Python's import locks detect a deadlock, and an import by this very thread: then there is no wait.
    """
    for package in dict.fromkeys(target.module.split(".")[0] for target in TARGETS):
        spec = getattr(sys.modules.get(package), "__spec__", None)
        if getattr(spec, "_initializing", False):
            importlib._bootstrap._lock_unlock_module(package)  # type: ignore[attr-defined]
    _install_all()


def enter(matmul: str | None, cache: str | int | None) -> list[Options]:
    """Enter a ``with enabled(matmul, cache)`` block; what comes back is for ``leave``."""
    global _outside
    options = (matmul, cache)
    block: list[Options] = [options]
    with _lock:
        before = _enabled, _options
        _switch_on(options)
        if not _blocks:
            _outside = before
        _blocks.append(block)
    _finish_imports()
    return block


def leave(block: list[Options]) -> None:
    """Leave a block: the options of the one entered last of those still open, or the state before the first of all."""
    with _lock:
        _blocks[:] = [other for other in _blocks if other is not block]
        on, options = (True, _blocks[-1][0]) if _blocks else _outside
        if on:
            _switch_on(options)
        else:
            disable()


def disable() -> None:
    """Turn every replacement off and put the originals back wherever ours still stands."""
    global _enabled
    with _lock:
        _enabled = False
        if "torch" in sys.modules:
            _set_switch(None)
        for entry in installed.values():
            entry.swap(entry.replacement, entry.original)
        for target in TARGETS:
            _remove_earlier(target)
    logger.info("nf4_patch is off")


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """The patch is off inside the block; afterwards it is on again if it was, with its options."""
    on, options = _enabled, _options
    disable()
    try:
        yield
    finally:
        if on:
            enable(*options)


def is_enabled() -> bool:
    return _enabled


def release() -> None:
    """Drop every cached weight."""
    if f"{__package__}.cache" in sys.modules:
        sys.modules[f"{__package__}.cache"].cache.release()


def _set_switch(config: Config | None) -> None:
    """What every call consults; None: off, with the options as they were."""
    from . import calibrated
    from .cache import cache
    from .switch import switch

    switch.on = config is not None
    cache.configure("off" if config is None else config.cache)
    if config is not None:
        switch.strict, switch.defer = config.strict, config.defer
        switch.matmul, switch.cache = config.matmul, config.cache
        calibrated.use(config)


def _on_import(target: Target, module: ModuleType) -> None:
    """Post-import hook: whatever happens here, the import of the module succeeds."""
    current = sys.modules.get(__name__)
    if current is not None and vars(current) is not globals():
        return  # nf4_patch was imported anew: this is the hook of the earlier import
    try:
        with _lock:
            if _enabled:
                config = Config.read(None, *_options)
                _set_switch(config)
                _install(target, module, not target.only or getattr(config, target.only) != "off")
    except Exception:
        logger.exception("nf4_patch could not replace %s; the original stays", target.name)
        installed[target.name] = Installed(target, refusal="an error inside nf4_patch: see the log")


def held(holder: Any, name: str, default: Any = None) -> Any:
    """What a module, class or dict holds under a name."""
    return holder.get(name, default) if isinstance(holder, dict) else getattr(holder, name, default)


def put(holder: Any, name: str, function: Any) -> None:
    """Into a module or dict as it is, into a class as the static method that stood there."""
    if isinstance(holder, dict):
        holder[name] = function
    else:
        setattr(holder, name, staticmethod(function) if isinstance(holder, type) else function)


def _is_ours(function: Any) -> bool:
    """A replacement of this package, of an earlier import of it too (importlib.reload, IPython's autoreload)."""
    return function is not None and getattr(function, "__nf4_patch__", None) is function


def _remove_earlier(target: Target) -> None:
    """Put the original back where a replacement of an earlier import of this package stands."""
    holder, name = target.holder(sys.modules.get(target.module))
    standing = held(holder, name)
    original = standing
    while _is_ours(original):
        original.__globals__["switch"].on = False  # another library may still call it
        original = original.__wrapped__
    if original is not standing:
        Installed(target, places=[(holder, name)]).swap(standing, original)


def _install(target: Target, module: ModuleType, wanted: bool) -> None:
    """Put the replacement in place, or only make it where its feature is switched off."""
    holder, name = target.holder(module)
    current = held(holder, name, ABSENT)
    if (target.unless and hasattr(module, target.unless)) or current is ABSENT:
        return
    entry = installed.get(target.name)
    if entry is not None and entry.replacement is not None:
        if current is entry.replacement or reaches(current, entry.replacement):
            if not wanted:
                entry.swap(entry.replacement, entry.original)
            return  # in place, or under another library's wrapper: the switch has turned it on again
        if current is entry.original and (holder, name) in entry.places:
            if wanted:
                entry.swap(entry.original, entry.replacement)
            return
    standing = current
    while _is_ours(current):
        current = current.__wrapped__
    refusal = _refusal(target, current)
    if refusal:
        installed[target.name] = Installed(target, refusal=refusal)
        logger.warning("nf4_patch leaves %s alone: %s", target.name, refusal)
        return
    replacement = target.make(current)
    places = [(holder, name)]
    if target.copied:
        places += [place for held in {standing, current} for place in _copies(held) if place not in places]
    for holder, name in places:
        put(holder, name, replacement)
    entry = installed[target.name] = Installed(target, current, replacement, places)
    if not wanted:
        entry.swap(replacement, current)


def _refusal(target: Target, function: Any) -> str:
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"it is a {type(function).__name__} whose signature cannot be read"
    if parameters in target.parameters or parameters == ("A", "args", "kwargs"):  # unsloth_zoo's wrapper
        return ""
    allowed = " or ".join(f"({', '.join(names)})" for names in target.parameters)
    return f"its parameters are ({', '.join(parameters)}), and this release of nf4_patch adapts {allowed}"


def _copies(function: Any) -> list[tuple[ModuleType, str]]:
    """Every module global that holds this very object."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is function
    ]


def reaches(function: Any, wanted: Any) -> bool:
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
