"""What is patched, how often it was hit, what fell back and why: the report, as data and as text."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from .counters import counters
from .placement import installed
from .reasons import Reason, Uncached
from .switch import switch
from .targets import SWITCHES, TARGETS

STANDING = ("patched", "wrapped", "displaced")  # see Installed.state
SHAPES_SHOWN = 8  # a model has about five; a report is one screen


@dataclass(frozen=True)
class TargetStatus:
    name: str
    state: str  # STANDING, inactive, refused, waiting (not imported), absent (not in this release), off
    hits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # by name of the Reason
    note: str = ""


@dataclass(frozen=True)
class CacheStatus:
    """Bytes are what PyTorch's allocator takes at most."""

    mode: str = "off"  # off, block, or bytes a GPU
    held: dict[int, int] = field(default_factory=dict)  # bytes by device index
    weights: int = 0
    hits: int = 0  # dequantizations saved
    misses: int = 0
    uncached: dict[str, int] = field(default_factory=dict)  # by name of the Uncached

    def __str__(self) -> str:
        held = ", ".join(f"{size / 2**30:.2f} GiB on device {device}" for device, size in self.held.items())
        reads = f"{self.hits} of {self.hits + self.misses} reads served"
        return f"cache {self.mode}: {self.weights} weights, {held or 'nothing'}; {reads}"


@dataclass(frozen=True)
class Status:
    """A snapshot of the process."""

    enabled: bool
    targets: tuple[TargetStatus, ...]
    shapes: dict[str, int]  # hits by "shape dtype"
    errors: tuple[str, ...]  # kernel failures, in full
    cache: CacheStatus = CacheStatus()
    weights: dict[str, int] = field(default_factory=dict)  # how many there are, by "shape dtype"

    @property
    def hits(self) -> int:
        return sum(target.hits for target in self.targets)

    @property
    def fallbacks(self) -> int:
        return sum(sum(target.fallbacks.values()) for target in self.targets)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        on = "on" if self.enabled else "off"
        lines = [f"nf4_patch is {on}: {self.hits} in the kernel, {self.fallbacks} fell back"]
        for target in self.targets:
            note = f" ({target.note})" if target.note else ""
            lines.append(f"  {target.name}: {target.state}, {target.hits} hits{note}")
            lines += [f"    {count} x {explain(reason)}" for reason, count in target.fallbacks.items()]
        most = sorted(((hits, shape) for shape, hits in self.shapes.items() if hits), reverse=True)
        lines += [f"  {hits} x {shape}" for hits, shape in most[:SHAPES_SHOWN]]
        if len(most) > SHAPES_SHOWN:
            lines.append(f"  and {len(most) - SHAPES_SHOWN} more shapes")
        if self.cache.mode != "off" or self.cache.hits:
            lines.append(f"  {self.cache}")
            lines += [f"    {count} x not cached: {explain(reason)}" for reason, count in self.cache.uncached.items()]
        lines += [f"  error: {error}" for error in self.errors]
        return "\n".join(lines)


def explain(name: str) -> str:
    """A Reason or an Uncached by its name, with its sentence and what to do about it."""
    if name in Uncached.__members__:
        return f"{name}: {Uncached[name].value}"
    reason = Reason[name]
    return f"{name}: {reason.sentence}" + (f" -> {reason.advice}" if reason.advice else "")


def status() -> Status:
    """A snapshot of what is patched, hit and refused in this process."""
    targets = []
    for target in TARGETS:
        entry = installed.get(target.name)
        note = ""
        if target.module not in sys.modules and entry is None:
            state = "waiting"
        elif not switch.on and (entry is None or entry.replacement is not None):
            state = "off"
        else:
            state, note = ("absent", "") if entry is None else (entry.state(), entry.refusal)
        hits = counters.hits(target.name)
        counts = {r.name: n for (name, r), n in list(counters.fallbacks.items()) if name == target.name}
        if state in STANDING and target.only and getattr(switch, target.only) == "off":
            state, note = "inactive", f'enable({target.only}="{SWITCHES[target.only]}") puts it in place'
        elif state == "patched" and target.only == "cache":
            note = "its reads may come from the cache"
        elif state == "patched" and not hits and not counts:
            note = "installed, never called"
        elif state == "patched" and not hits:
            note = "installed, never hit"
        elif state == "displaced":
            note = "another library put its own function there; enable() again to take it back"
        targets.append(TargetStatus(target.name, state, hits, counts, note))
    shapes: dict[str, int] = {}
    addresses: dict[str, set[int]] = {}
    for (_, shape, dtype), counter in list(counters.hit_counters.items()):
        key = f"{'x'.join(map(str, shape))} {dtype.removeprefix('torch.')}"
        shapes[key] = shapes.get(key, 0) + counter.hits
        addresses.setdefault(key, set()).update(counter.addresses)
    weights = {key: len(known) for key, known in addresses.items() if known}
    return Status(switch.on, tuple(targets), shapes, tuple(counters.errors), cache_status(), weights)


def cache_status() -> CacheStatus:
    module = sys.modules.get(f"{__package__}.cache.cache")  # it needs torch
    if module is None:
        return CacheStatus()
    now = module.cache.snapshot()
    uncached = {reason.name: count for reason, count in now.uncached.items()}
    return CacheStatus(str(module.cache.mode), now.held, now.weights, now.hits, now.misses, uncached)
