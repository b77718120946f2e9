"""What is patched, how often it was hit, what fell back and why: the report, as data and as text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config import keeps_off
from .counters import counters
from .options import OPTIONS, CacheStatus, OffloadStatus
from .placement import installed
from .reasons import Reason
from .state import State
from .switch import switch
from .target import Target
from .targets import TARGETS

NEVER_CALLED, NEVER_HIT = "installed, never called by eager code", "installed, never hit"
SHAPES_SHOWN = 8  # a model has about five; a report is one screen


@dataclass(frozen=True)
class TargetStatus:
    name: str
    state: State
    hits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # by name of the Reason
    note: str = ""

    @property
    def calls(self) -> int:
        return self.hits + sum(self.fallbacks.values())


@dataclass(frozen=True)
class Status:
    """A snapshot of the process."""

    enabled: bool
    targets: tuple[TargetStatus, ...]  # and what else was called: ``dequantize_nf4``, the search for cache="auto"
    shapes: dict[str, int]  # hits by "shape dtype"
    errors: tuple[str, ...]  # kernel failures, in full
    cache: CacheStatus = field(default_factory=CacheStatus)
    weights: dict[str, int] = field(default_factory=dict)  # addresses so far, also of freed ones, by "shape dtype"
    offload: dict[str, OffloadStatus] = field(default_factory=dict)  # by GPU
    forbidden: str = ""  # the variables that keep the patch off, "NF4_PATCH=0" for example

    @property
    def hits(self) -> int:
        return sum(target.hits for target in self.targets)

    @property
    def fallbacks(self) -> int:
        """Those of which something was missed: an expected Reason is in its target's ``fallbacks`` alone."""
        every = (item for target in self.targets for item in target.fallbacks.items())
        return sum(count for name, count in every if not Reason[name].is_expected)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        on = "on" if self.enabled else f"off ({self.forbidden})" if self.forbidden else "off"
        lines = [f"nf4_patch is {on}: {self.hits} in the kernel, {self.fallbacks} fell back"]
        shown, rest = folded(self.targets)
        for target in shown:
            note = f" ({target.note})" if target.note else ""
            lines.append(f"  {target.name}: {target.state}, {target.hits} hits{note}")
            lines += [f"    {count} x {explain(reason)}" for reason, count in target.fallbacks.items()]
        lines += [f"  {rest}"] if rest else []
        most = sorted(((hits, shape) for shape, hits in self.shapes.items() if hits), reverse=True)
        lines += [f"  {hits} x {shape}" for hits, shape in most[:SHAPES_SHOWN]]
        if len(most) > SHAPES_SHOWN:
            lines.append(f"  and {len(most) - SHAPES_SHOWN} more shapes")
        for name, option in OPTIONS.items():
            lines += [f"  {line}" for line in option.lines(getattr(self, name))] if option.lines else []
        lines += [f"  error: {error}" for error in self.errors]
        return "\n".join(lines)


def folded(targets: Sequence[TargetStatus]) -> tuple[list[TargetStatus], str]:
    """The targets that have something to say, and one line on all others ("" if there are none).

    A target that was never called says something only while none was: most models do not have what it covers.
    """
    used = any(target.calls for target in targets)
    always = (State.WRAPPED, State.DISPLACED, State.REFUSED)
    shown = [t for t in targets if t.calls or t.state in always or (t.note == NEVER_CALLED and not used)]
    rest = [target for target in targets if target not in shown]
    libraries = dict.fromkeys(waited_for(target) for target in rest if target.state is State.WAITING)
    names = {
        State.ABSENT: "not in this release", State.INACTIVE: "belong to options that are off",
        State.PATCHED: "not called" if used else "in place", State.WAITING: f"not imported ({', '.join(libraries)})",
    }  # fmt: skip
    kinds = [f"{count} {names.get(state, state)}" for state, count in Counter(t.state for t in rest).items()]
    return shown, f"{len(rest)} more target{'s' * (len(rest) != 1)}: {', '.join(kinds)}" if rest else ""


def waited_for(status: TargetStatus) -> str:
    """The library whose import a target waits for, or the one module of an imported library."""
    target = next(target for target in TARGETS if target.name == status.name)
    return target.module if target.library in sys.modules else target.library


def explain(name: str) -> str:
    """A Reason by its name, with its sentence and what to do about it."""
    reason = Reason[name]
    return f"{name}: {reason.sentence}" + (f" -> {reason.advice}" if reason.advice else "")


def calls_of(name: str) -> tuple[int, dict[str, int]]:
    """The hits of a target, and its fallbacks by name of the Reason."""
    return counters.hits(name), {r.name: n for (target, r), n in list(counters.fallbacks.items()) if target == name}


def status_of(target: Target) -> TargetStatus:
    entry = installed.get(target.name)
    hits, fallbacks = calls_of(target.name)
    state, note = (State.ABSENT if target.trigger in sys.modules else State.WAITING), ""
    if entry is not None:
        state = entry.state()
        note = entry.refusal if state is State.REFUSED else ""
    if not switch.on and state not in (State.WAITING, State.REFUSED):
        state = State.OFF
    elif state.was_patched and target.only and not switch.gates[target.only].on:
        state, note = State.INACTIVE, f'enable({target.only}="{OPTIONS[target.only].on}") puts it in place'
    elif state is State.PATCHED:
        note = target.uncounted or ("" if hits else NEVER_HIT if fallbacks else NEVER_CALLED)
    elif state is State.DISPLACED and entry is not None:
        note = entry.why_displaced()
    return TargetStatus(target.name, state, hits, fallbacks, note)


def status() -> Status:
    """A snapshot of what is patched, hit and refused in this process."""
    targets = {target.name: status_of(target) for target in TARGETS}
    for name in [key[0] for key in list(counters.hit_counters)] + [key[0] for key in list(counters.fallbacks)]:
        if name not in targets and (own := TargetStatus(name, State.OWN, *calls_of(name))).calls:
            targets[name] = own
    shapes: dict[str, int] = {}
    addresses: dict[str, set[int]] = {}
    for (_, shape, dtype, kernel), counter in list(counters.hit_counters.items()):
        sides = "x".join(map(str, shape)) or "1"  # a weight of shape () is one element
        key = f"{sides} {dtype} {kernel}".rstrip()
        shapes[key] = shapes.get(key, 0) + counter.hits
        addresses.setdefault(key, set()).update(counter.addresses)
    weights = {key: len(known) for key, known in addresses.items() if known}
    reports = {name: option.report(switch.value(name)) for name, option in OPTIONS.items() if option.report}
    errors = tuple(counters.errors)
    return Status(switch.on, tuple(targets.values()), shapes, errors, weights=weights, forbidden=keeps_off(), **reports)
