"""On and off: every row is installed now, or when its module is imported; for good, or in a ``with`` block."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from .config import Config, unknown_variables
from .counters import warn_once
from .locks import new_lock
from .placement import Installed, install, installed, is_of_an_earlier_import
from .switch import switch
from .target import Target
from .targets import TARGETS

logger = logging.getLogger("nf4_patch")
Given = str | int | None  # for an option, by its name in OPTIONS

lock = new_lock()
_hooked = False
_blocks: list[list[Config | None]] = []  # of each ``with`` block that is entered: what was in force before it


def enable(**options: Given) -> bool:
    """Replace every target, now or when its module is imported: see :func:`nf4_patch.enable`."""
    for sentence in unknown_variables():
        warn_once(sentence)
    with lock:
        config = Config.read(None, switch.config, **options)
        if config.forbidden:
            warn_once(f"nf4_patch stays off: {config.forbidden}")
        put_in_force(None if config.forbidden else config)
    return switch.on


def put_in_force(config: Config | None) -> None:
    """On with this configuration, or off. Nothing is read from the environment."""
    global _hooked
    with lock:
        if any(map(is_of_an_earlier_import, TARGETS)):
            warn_once("nf4_patch was imported twice: what the first import replaced stays; restart the process")
            config = None
        switch.set(config)
        if config is None:
            for entry in installed.values():
                if not entry.target.permanent:
                    entry.swap(on=False)
            logger.info("nf4_patch is off")
            return
        for target in TARGETS:
            if not _hooked:
                hook(target)
            elif target.trigger in sys.modules:
                _on_import(target)
        _hooked = True
        logger.info("nf4_patch is on: %s", ", ".join(n for n, i in installed.items() if i.replacement) or "waiting")


def disable() -> None:
    """Turn every replacement off and put the originals back wherever ours is still in place."""
    put_in_force(None)


@contextmanager
def block(**options: Given) -> Iterator[None]:
    """On inside. Blocks may overlap, in several threads too: see :func:`nf4_patch.enabled`."""
    before: list[Config | None] = []
    try:
        with lock:
            before.append(switch.config)
            _blocks.append(before)
            enable(**options)
        yield
    finally:
        with lock:
            # no place: interrupted before anything was changed
            for place in [index for index, other in enumerate(_blocks) if other is before]:
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
            for target in [target for target in TARGETS if self.name in (target.module, target.trigger)]:
                hook(target)


def is_halfway(module: ModuleType) -> bool:
    """Whether its import is under way; its rows are then installed as soon as it is complete."""
    spec: Any = getattr(module, "__spec__", None)
    if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
        spec.__class__ = Halfway
    return isinstance(spec, Halfway) and spec._initializing  # another thread's may have ended meanwhile


def _on_import(target: Target, _trigger: ModuleType | None = None) -> None:
    """Post-import hook: whatever happens here, the import of the module succeeds."""
    try:
        with lock:
            if (switch.on or target.permanent) and not any(
                is_halfway(sys.modules[name]) for name in (target.trigger, target.module)
            ):
                install(target, sys.modules[target.module], switch.wants(target) or target.permanent)
    except Exception as error:
        entry = installed[target.name] = installed.get(target.name) or Installed(target)
        entry.refuse(entry.current(), "an error inside nf4_patch: see the log")
        _log_once(f"nf4_patch could not replace {target.name}; the original stays: {type(error).__name__}: {error}")


@functools.cache
def _log_once(sentence: str) -> None:
    """Log the error that is being handled, once for each sentence."""
    logger.exception(sentence)
