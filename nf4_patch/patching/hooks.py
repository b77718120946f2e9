"""Turn the patch on and off. A target whose module is not imported yet is replaced when the module is imported."""

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
from .effects import say_at_exit
from .locks import new_lock
from .placement import Installed, install, installed, is_of_an_earlier_import
from .switch import switch
from .target import Target
from .targets import TARGETS

logger = logging.getLogger("nf4_patch")
Given = str | int | None  # value of an option as the user passes it

lock = new_lock()
_hooked = False  # whether the import hooks are registered
# For each active ``with`` block, a list with one item: the configuration from before the block.
_blocks: list[list[Config | None]] = []


def enable(profile: str | None = None, **options: Given) -> bool:
    """Turn the patch on with these options. See :func:`nf4_patch.enable`."""
    for sentence in unknown_variables():
        warn_once(sentence)
    with lock:
        config = Config.read(None, switch.config, profile, **options)
        if config.forbidden:
            warn_once(f"nf4_patch stays off: {config.forbidden}")
        put_in_force(None if config.forbidden else config)
    return switch.on


def put_in_force(config: Config | None) -> None:
    """Turn the patch on with ``config``, or off with None. Environment variables are not read again."""
    global _hooked
    with lock:
        if any(map(is_of_an_earlier_import, TARGETS)):
            warn_once(
                "nf4_patch was imported twice, and the replacements of the first import stay in place; restart the process"
            )
            config = None
        switch.set(config)
        say_at_exit()
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
    """Turn off every replacement. Put each original back, unless another library replaced or wrapped the replacement."""
    put_in_force(None)


@contextmanager
def block(profile: str | None = None, **options: Given) -> Iterator[None]:
    """Turn the patch on inside a ``with`` block. See :func:`nf4_patch.enabled`.

    Blocks of several threads may overlap and end in any order.
    """
    before: list[Config | None] = []
    try:
        with lock:
            before.append(switch.config)
            _blocks.append(before)
            enable(profile, **options)
        yield
    finally:
        with lock:
            # If an interrupt came before ``_blocks.append``, this loop does nothing.
            for place in [index for index, other in enumerate(_blocks) if other is before]:
                del _blocks[place]
                # While a block that was entered later is active, its configuration stays in force. That block restores
                # ``before`` when it ends.
                if place < len(_blocks):
                    _blocks[place][:] = before
                else:
                    put_in_force(before[0])


def hook(target: Target) -> None:
    """Install the target now, or when its module is imported."""
    wrapt.register_post_import_hook(functools.partial(_on_import, target), target.trigger)


class Halfway(ModuleSpec):
    """Spec of a module that is being imported. It installs the module's targets when the import ends.

    A module might define a target at the end of its import, or define it again. For example,
    transformers.integrations.bitsandbytes first imports bitsandbytes, which turns the patch on with NF4_PATCH=1. At the
    end of an import, even a failed one, Python sets ``_initializing`` to False, which tells the spec that the import
    has ended.
    """

    _initializing: bool

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for target in [target for target in TARGETS if self.name in (target.module, target.trigger)]:
                hook(target)


def is_halfway(module: ModuleType) -> bool:
    """Return whether the module is being imported. If so, its targets will be installed when the import ends."""
    spec: Any = getattr(module, "__spec__", None)
    if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
        spec.__class__ = Halfway
    # Read ``_initializing`` again, because the import may run in another thread and may have ended by now.
    return isinstance(spec, Halfway) and spec._initializing


def _on_import(target: Target, _trigger: ModuleType | None = None) -> None:
    """Install the target. Log errors, because an exception would make the user's import fail."""
    try:
        with lock:
            if (switch.on or target.permanent) and not any(
                is_halfway(sys.modules[name]) for name in (target.trigger, target.module)
            ):
                install(target, sys.modules[target.module], switch.wants(target))
    except Exception as error:
        entry = installed[target.name] = installed.get(target.name) or Installed(target)
        entry.refuse(entry.current())
        _log_once(f"nf4_patch could not replace {target.name}, so the original runs: {type(error).__name__}: {error}")


@functools.cache
def _log_once(sentence: str) -> None:
    logger.exception(sentence)
