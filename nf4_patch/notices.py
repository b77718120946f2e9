"""What is said on stderr about the environment: that it switched the patch on, or that an option had no effect.

Once, in the first process of a launcher and in no worker of multiprocessing; not with NF4_PATCH_QUIET=1, nor where the
logger "nf4_patch" is set above WARNING. Code that calls ``enable`` is told nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from typing import Any

from .config import Config, ConfigError, is_first_process, options_set
from .version import __version__

silenced = False  # by the command line, whose reports say the same


@functools.cache
def say(line: str) -> None:
    worker = sys.modules.get("multiprocessing.process")
    if silenced or not is_first_process() or (worker is not None and worker.current_process().name != "MainProcess"):
        return
    if not logging.getLogger(__package__).isEnabledFor(logging.WARNING):
        return
    with contextlib.suppress(ConfigError):  # said by whoever reads the others
        if Config.read().quiet:
            return
    with contextlib.suppress(OSError, ValueError):  # stderr is full or closed
        if sys.stderr is not None:
            print(line, file=sys.stderr)


def say_when_it_is_used() -> None:
    """When bitsandbytes is imported: until then there is nothing to patch."""
    import wrapt

    wrapt.register_post_import_hook(_say_that_it_is_on, "bitsandbytes")


def _say_that_it_is_on(bitsandbytes: Any) -> None:
    from .patching.switch import switch

    options = "".join(f", {option}" for option in options_set())
    if switch.on:
        say(f"nf4_patch {__version__} is on (NF4_PATCH=1{options}). NF4_PATCH_QUIET=1 hides this line.")


@functools.cache  # bitsandbytes loads us as a backend a second time
def watch_options() -> None:
    """At the end of the process: say that an option was set and nothing switched the patch on.

    Not earlier: until then the code may call ``enable``, which reads the options.
    """
    if options_set():
        atexit.register(_say_that_options_had_no_effect, os.getpid())


def _say_that_options_had_no_effect(process: int) -> None:
    placement = sys.modules.get(f"{__package__}.patching.placement")
    was_on = placement is not None and placement.installed
    if was_on or os.getpid() != process or "bitsandbytes" not in sys.modules:
        return
    with contextlib.suppress(ConfigError):  # such a value had no effect either
        if Config.read().forbidden:
            return
    if options := ", ".join(options_set()):
        say(f"nf4_patch: {options} had no effect, the patch was off. NF4_PATCH=1 or nf4_patch.enable() switches it on.")
