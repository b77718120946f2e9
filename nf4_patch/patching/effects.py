"""The effect of each option in this process: how many calls it handled, and why it refused other calls.

A call of a target with two options counts for the option that its Reason names, such as ``ACTIVATIONS_BUDGET``. Otherwise
it counts for the first option, or for the second if only that one is on or was used.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .config import is_worker, rank
from .counters import FallbackError, counters, logger
from .option import OPTIONS, Option, size_in_words
from .reasons import NOT_MEANT, TEMPORARY, Reason
from .switch import switch
from .target import Target
from .targets import TARGETS

# After this many refused calls of one target for one Reason, log the option's effect.
SOON, LATE = 100, 10_000  # LATE: for Reasons in TEMPORARY and NOT_MEANT
_said: set[str] = set()  # options whose effect was logged


@dataclass(frozen=True)
class Effect:
    """The effect of an option in this process. ``status().options`` has one for each option."""

    value: str | int = "off"  # the current value; a size is in bytes
    typed: bool = False  # whether an argument or a variable set the value. If not, it is the profile's or the default
    lacks: tuple[str, ...] = ()  # unmet requirements; if there are any, the profile leaves the option off
    used: int = 0  # calls that the option handled
    refused: dict[str, int] = field(default_factory=dict)  # calls that ran the original, by the Reason's name

    @property
    def calls(self) -> int:
        return self.used + sum(self.refused.values())

    @property
    def helps_little(self) -> bool:
        """Return whether the option is on, but refused most calls, or handled none although the user typed it."""
        meant = sum(n for name, n in self.refused.items() if Reason[name] not in NOT_MEANT)
        idle = self.typed and not self.used and counters.anything()
        return self.value != "off" and (idle or meant > self.used)


def effects() -> dict[str, Effect]:
    config, found = switch.config, {}
    for name, option in OPTIONS.items():
        used, refused = counted(name, option)
        typed, lacks = (name in config.typed, config.lacking.get(name, ())) if config else (False, ())
        found[name] = Effect(switch.value(name), typed, lacks, used, refused)
    return found


def counted(name: str, option: Option) -> tuple[int, dict[str, int]]:
    """Return how many calls an option handled, and how many it refused, by the Reason's name."""
    targets = {target.name for target in TARGETS if owner(target) == name} | {name}
    refused: Counter[str] = Counter()
    for (target, reason), count in list(counters.fallbacks.items()):
        row = targets_by_name().get(target)
        if target == name or (row is not None and owner(row, reason) == name):
            refused[reason.name] += count
    if option.used is not None and option.report is not None:
        used = option.used(option.report(switch.value(name)))
    elif name in counters.uses:
        used = counters.uses[name].hits
    else:
        used = sum(map(counters.hits, targets))
    # A backward that cannot replay belongs to a forward that did.
    return max(used - refused[Reason.GRAPH_BACKWARD.name], 0), {k: n for k, n in refused.most_common() if n}


def in_use(name: str) -> bool:
    return name in switch.gates and (switch.gates[name].on or (name in counters.uses and counters.uses[name].hits > 0))


def owner(target: Target, reason: Reason | None = None) -> str:
    """Return the option under which the target's calls are counted, or ""."""
    first, second = target.option, target.or_option
    if second and reason is not None:
        for name in (first, second):
            if reason.name.startswith(f"{name.upper()}_") and in_use(name):
                return name
    if second and not in_use(first) and in_use(second):
        return second
    return first if first in OPTIONS else ""


def line(name: str, effect: Effect, told: set[str] | None = None) -> str:
    """Describe an option's effect in one line: how many calls it handled, why it handled no more, and what to do.

    Reasons in ``told`` need no explanation. Those that are explained here are added to it.
    """
    option = OPTIONS[name]
    if effect.lacks:
        return f'{name}="{option.fast}": off, because it needs {" or ".join(effect.lacks)}, which is not installed'
    words = size_in_words(effect.value) if isinstance(effect.value, int) else effect.value
    head = f'{name}="{words}": '
    if option.idle:
        return f"{head}{option.idle}"
    if not effect.calls:
        return f"{head}no {option.calls} yet"
    head += f"{effect.used:,} of {effect.calls:,} {option.calls}"
    ranked = sorted(effect.refused.items(), key=lambda item: (Reason[item[0]] in NOT_MEANT, -item[1]))
    if not ranked:
        return head
    first, *others = ranked
    if effect.used > effect.calls / 2:
        return f"{head} ({', '.join(f'{count:,} x {reason}' for reason, count in ranked)})"
    also = f" (also {', '.join(f'{count:,} x {reason}' for reason, count in others)})" if others else ""
    return f"{head}, because {first[1]:,} x {explain(first[0], told)}{also}"


def explain(name: str, told: set[str] | None = None) -> str:
    """Return a Reason's name with its sentence and advice, unless it is in ``told``."""
    told, reason = set() if told is None else told, Reason[name]
    if name in told:
        return name
    told.add(name)
    return f"{name}: {reason.sentence}" + (f" -> {reason.advice}" if reason.advice else "")


@functools.cache
def targets_by_name() -> dict[str, Target]:
    return {target.name: target for target in TARGETS}


def refused(target: str, reason: Reason) -> None:
    """Note that an option refused a call. After many such calls, log the option's effect once.

    Raises:
        FallbackError: with NF4_PATCH_STRICT=1, if the user named the option, and it has not handled any call.
    """
    row = targets_by_name().get(target)
    name = "" if row is None else owner(row, reason)
    if not name or not switch.gates[name].on:
        return
    lasting = reason not in TEMPORARY and reason not in NOT_MEANT
    if counters.fallbacks[target, reason] == (SOON if lasting else LATE):
        say(name)
    elif lasting and switch.strict and switch.config is not None and name in switch.config.typed:
        effect = effects()[name]
        if not effect.used:
            raise FallbackError(f"{line(name, effect)} (NF4_PATCH_STRICT=1)")


def is_idle(option: Option, effect: Effect, report: Any) -> bool:
    """Return whether an option without a counter did nothing."""
    return bool(option.idle) and effect.value != "off" and not report


def say(name: str) -> None:
    """Log what an option did, if it did little. Each option is logged once, and only by rank 0, not by workers."""
    effect, option = effects()[name], OPTIONS[name]
    if option.idle and option.report is not None:
        is_little = counters.anything() and is_idle(option, effect, option.report(effect.value))
    else:
        is_little = bool(option.calls) and effect.helps_little
    if is_little and name not in _said and rank() in ("", "0") and not is_worker():
        _said.add(name)
        logger.warning("nf4_patch: %s", line(name, effect))


@functools.cache
def say_at_exit() -> None:
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:  # not in a fork
            for name in OPTIONS:
                say(name)

    atexit.register(end)
