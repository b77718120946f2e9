"""On and off: every row is installed now, or when its module is imported; for good, or in a ``with`` block."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from ..config import Config, unknown_variables
from .counters import warn_once
from .locks import new_lock
from .placement import Installed, install, installed, remove_earlier
from .switch import switch
from .targets import TARGETS, Target

logger = logging.getLogger("nf4_patch")
Given = str | int | None  # for an option, by its name in config.OPTIONS

lock = new_lock()  # never held while waiting for another thread's import, which takes it in _on_import
_hooked = False
_blocks: list[list[Config | None]] = []  # of each ``with`` block that is entered: what was in force before it


def enable(**options: Given) -> bool:
    """Replace every target, now or when its module is imported: see :func:`nf4_patch.enable`."""
    on = switch_on(options)
    finish_imports()
    return on


def switch_on(options: Mapping[str, Given]) -> bool:
    for sentence in unknown_variables():
        warn_once(sentence)
    with lock:
        config = Config.read(None, switch.config, **options)
        if config.forbidden:
            warn_once(f"nf4_patch stays off: {config.forbidden}")
        put_in_force(None if config.forbidden else config)
    return not config.forbidden


def put_in_force(config: Config | None) -> None:
    """On with this configuration, or off. Nothing is read from the environment."""
    global _hooked
    with lock:
        switch.set(config)
        if config is None:
            for entry in installed.values():
                if not entry.target.stays:
                    entry.swap(entry.replacement, entry.original)
            for target in TARGETS:
                if target.name not in installed:
                    remove_earlier(target)
            logger.info("nf4_patch is off")
            return
        for target in TARGETS:
            if not _hooked:
                hook(target)
            elif target.trigger in sys.modules:
                _on_import(target)
        _hooked = True
        logger.info("nf4_patch is on: %s", ", ".join(n for n, i in installed.items() if i.replacement) or "waiting")


def finish_imports() -> None:
    """Wait until other threads have imported what is patched: a hook registered in the middle of an import does not fire.

    Python's import locks detect a deadlock, and an import by this very thread: then there is no wait.
    """
    for package in dict.fromkeys(target.trigger.split(".")[0] for target in TARGETS):
        spec = getattr(sys.modules.get(package), "__spec__", None)
        if getattr(spec, "_initializing", False):
            importlib._bootstrap._lock_unlock_module(package)  # type: ignore[attr-defined]
            for target in TARGETS:
                if target.trigger.split(".")[0] == package and target.trigger in sys.modules:
                    _on_import(target)


def disable() -> None:
    """Turn every replacement off and put the originals back wherever ours is still in place."""
    put_in_force(None)


@contextmanager
def block(**options: Given) -> Iterator[None]:
    """On inside. Blocks may overlap, in several threads too: see :func:`nf4_patch.enabled`."""
    with lock:
        before = [switch.config]
        switch_on(options)
        _blocks.append(before)
    try:
        finish_imports()
        yield
    finally:
        with lock:
            place = next(index for index, other in enumerate(_blocks) if other is before)
            del _blocks[place]
            if place < len(_blocks):  # one that was entered later goes on, and will restore this
                _blocks[place][:] = before
            else:
                put_in_force(before[0])


def hook(target: Target) -> None:
    """Install the row when its module is imported: now, where it is."""
    wrapt.register_post_import_hook(functools.partial(_on_import, target), target.trigger)


class Halfway(ModuleSpec):
    """The spec of a module whose import is under way: Python sets ``_initializing`` to False at its end, also where it failed.

    Such a module may lack the function, or replace it further down: transformers' integration of bitsandbytes imports
    bitsandbytes, which enables the patch, before it has a class.
    """

    _initializing: bool

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for target in [target for target in TARGETS if target.module == self.name]:
                hook(target)


def is_halfway(module: ModuleType) -> bool:
    """Whether its import is under way; its rows are then installed as soon as it is complete."""
    spec: Any = getattr(module, "__spec__", None)
    if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
        spec.__class__ = Halfway
    return isinstance(spec, Halfway) and spec._initializing  # another thread's may have ended meanwhile


def _on_import(target: Target, _trigger: ModuleType | None = None) -> None:
    """Post-import hook: whatever happens here, the import of the module succeeds."""
    current = sys.modules.get(__name__)
    if current is not None and vars(current) is not globals():
        return  # nf4_patch was imported again: this is the hook of the earlier import
    try:
        with lock:
            module = sys.modules[target.module]
            if switch.on and not is_halfway(module):
                install(target, module, switch.gates[target.only].on or target.stays)
    except Exception:
        logger.exception("nf4_patch could not replace %s; the original stays", target.name)
        installed[target.name] = Installed(target, refusal="an error inside nf4_patch: see the log")
