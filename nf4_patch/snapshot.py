"""``nf4_patch.status()``: the patched targets, with their hits and fallbacks, as data and as text.

A hit is a call that the replacement handled. A fallback is a call that ran the original, for a Reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .options import OPTIONS, ActivationsStatus, CacheStatus, GraphsStatus, OffloadStatus
from .patching.config import keeps_off
from .patching.counters import counters
from .patching.placement import installed
from .patching.reasons import Reason
from .patching.state import State
from .patching.switch import switch
from .patching.target import Target
from .patching.targets import TARGETS

NEVER_CALLED, ONLY_FALLBACKS = "installed, never called by eager code", "every counted call ran the original"
SHAPES_SHOWN = 8  # maximum number of shapes in a printed status, so that it fits on a screen; a model has about five


@dataclass(frozen=True)
class TargetStatus:
    name: str
    state: State
    hits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # by the Reason's name
    note: str = ""

    @property
    def calls(self) -> int:
        return self.hits + sum(self.fallbacks.values())


@dataclass(frozen=True)
class Status:
    """Snapshot of the patch in this process."""

    enabled: bool
    targets: tuple[TargetStatus, ...]  # includes functions of this package that were called, such as ``dequantize_nf4``
    shapes: dict[str, int]  # hits by "shape dtype"
    errors: tuple[str, ...]  # full messages of kernel failures
    cache: CacheStatus = field(default_factory=CacheStatus)
    weights: dict[str, int] = field(default_factory=dict)  # number of weights dequantized so far, by "shape dtype"
    offload: dict[str, OffloadStatus] = field(default_factory=dict)  # by GPU
    graphs: GraphsStatus = field(default_factory=GraphsStatus)
    activations: ActivationsStatus = field(default_factory=ActivationsStatus)
    matmul: dict[str, str] = field(
        default_factory=dict
    )  # result and times of each measurement of the fused matmul, by the sizes of x and the weight
    forbidden: str = ""  # the variables that keep the patch off, "NF4_PATCH=0" for example

    @property
    def hits(self) -> int:
        return sum(target.hits for target in self.targets)

    @property
    def fallbacks(self) -> int:
        """Return the number of fallbacks that cost speed. Expected ones are counted only in ``TargetStatus``."""
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
    """Return the targets that a printed status lists, and one line that counts all others ("" if there are none).

    List uncalled targets only if nothing was called, because most models do not use all targets.
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
    """Return the library that still has to be imported before the target is patched.

    If the library is imported already, return the target's module instead, because only that module is missing.
    """
    target = next(target for target in TARGETS if target.name == status.name)
    return target.module if target.library in sys.modules else target.library


def explain(name: str) -> str:
    """Return a Reason's name with its sentence and advice."""
    reason = Reason[name]
    return f"{name}: {reason.sentence}" + (f" -> {reason.advice}" if reason.advice else "")


def calls_of(name: str) -> tuple[int, dict[str, int]]:
    """Return the hits of a target, and its fallbacks by the Reason's name."""
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
    elif state.was_patched and target.option and not switch.wants(target):
        state, note = State.INACTIVE, f'enable({target.option}="{OPTIONS[target.option].on}") turns it on'
    elif state is State.PATCHED:
        note = target.uncounted or ("" if hits else ONLY_FALLBACKS if fallbacks else NEVER_CALLED)
    elif state is State.DISPLACED and entry is not None:
        note = entry.why_displaced()
    return TargetStatus(target.name, state, hits, fallbacks, note)


def status() -> Status:
    """Return a snapshot of patched targets, hits and fallbacks in this process."""
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
