"""Turn the patch on and off. Each target is installed now, or when its module is imported."""

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
Given = str | int | None  # value of an option as the user passes it

lock = new_lock()
_hooked = False  # whether the import hooks are registered
_blocks: list[list[Config | None]] = []  # one per entered ``with`` block: the configuration from before the block


def enable(**options: Given) -> bool:
    """Replace every target, now or when its module is imported. See :func:`nf4_patch.enable`."""
    for sentence in unknown_variables():
        warn_once(sentence)
    with lock:
        config = Config.read(None, switch.config, **options)
        if config.forbidden:
            warn_once(f"nf4_patch stays off: {config.forbidden}")
        put_in_force(None if config.forbidden else config)
    return switch.on


def put_in_force(config: Config | None) -> None:
    """Turn the patch on with ``config``, or off if ``config`` is None. The environment is not read."""
    global _hooked
    with lock:
        if any(map(is_of_an_earlier_import, TARGETS)):
            warn_once(
                "nf4_patch was imported twice, and the replacements of the first import stay in place; restart the process"
            )
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
    """Turn every replacement off, and put the originals back where no other library has replaced or wrapped ours."""
    put_in_force(None)


@contextmanager
def block(**options: Given) -> Iterator[None]:
    """Turn the patch on inside a ``with`` block. Blocks may overlap, also in several threads. See :func:`nf4_patch.enabled`."""
    before: list[Config | None] = []
    try:
        with lock:
            before.append(switch.config)
            _blocks.append(before)
            enable(**options)
        yield
    finally:
        with lock:
            # no place is found if an interrupt came before the block was entered
            for place in [index for index, other in enumerate(_blocks) if other is before]:
                del _blocks[place]
                # A block that was entered later is still active, so its configuration stays. It restores ``before`` at
                # its end.
                if place < len(_blocks):
                    _blocks[place][:] = before
                else:
                    put_in_force(before[0])


def hook(target: Target) -> None:
    """Install the target now if its module is imported already, otherwise as soon as the module is imported."""
    wrapt.register_post_import_hook(functools.partial(_on_import, target), target.trigger)


class Halfway(ModuleSpec):
    """Spec of a module that is being imported. It installs the module's targets when the import ends.

    Python sets ``_initializing`` to False at the end of an import, even if the import failed. Before that, the module
    may lack the function or may still redefine it. For example, transformers.integrations.bitsandbytes first imports
    bitsandbytes, which may turn the patch on (NF4_PATCH=1). At that time transformers.integrations.bitsandbytes has not
    defined any class yet.
    """

    _initializing: bool

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for target in [target for target in TARGETS if self.name in (target.module, target.trigger)]:
                hook(target)


def is_halfway(module: ModuleType) -> bool:
    """Return whether the module is being imported. If it is, its targets are installed when the import ends."""
    spec: Any = getattr(module, "__spec__", None)
    if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
        spec.__class__ = Halfway
    return isinstance(spec, Halfway) and spec._initializing  # an import in another thread may have ended meanwhile


def _on_import(target: Target, _trigger: ModuleType | None = None) -> None:
    """Install the target. This is a post-import hook, so it never raises."""
    try:
        with lock:
            if (switch.on or target.permanent) and not any(
                is_halfway(sys.modules[name]) for name in (target.trigger, target.module)
            ):
                install(target, sys.modules[target.module], switch.wants(target))
    except Exception as error:
        entry = installed[target.name] = installed.get(target.name) or Installed(target)
        entry.refuse(entry.current(), "nf4_patch raised an error, see the log")
        _log_once(f"nf4_patch could not replace {target.name}, so the original runs: {type(error).__name__}: {error}")


@functools.cache
def _log_once(sentence: str) -> None:
    """Log the exception that is being handled. The same sentence is logged only once."""
    logger.exception(sentence)
