"""``nf4_patch.status()``: which calls ran in the kernel, and what each option did, as data and as text.

A hit is a call that the replacement handled. A fallback is a call that ran the original, for a Reason. The text's first
line counts dequantizations. Each option has a line for its calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .options import OPTIONS, ActivationsStatus, CacheStatus, GraphsStatus, MatmulStatus, OffloadStatus
from .patching.config import keeps_off
from .patching.counters import counters
from .patching.effects import Effect, effects, explain, is_idle, line
from .patching.placement import installed, unsupported
from .patching.reasons import Reason
from .patching.state import State
from .patching.switch import switch
from .patching.target import Target
from .patching.targets import TARGETS

NEVER_CALLED, ONLY_FALLBACKS = "installed, never called by eager code", "every counted call ran the original"
NO_GPU = "PyTorch finds no CUDA GPU: every call runs the original"
UNREPLACED = State.DISPLACED, State.REFUSED
TROUBLES = State.WRAPPED, *UNREPLACED  # a printed status lists each target in these states
ROWS = {target.name: target for target in TARGETS}


@dataclass(frozen=True)
class TargetStatus:
    name: str
    state: State
    hits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # by the Reason's name
    found: str = ""  # if the function cannot be replaced: its parameters, such as "(A, quant_state)"

    @property
    def calls(self) -> int:
        return self.hits + sum(self.fallbacks.values())

    @property
    def note(self) -> str:
        """Explain the state to the user, or return ""."""
        target = ROWS.get(self.name)
        if self.state is State.INACTIVE and target is not None:
            return f'enable({target.option}="{OPTIONS[target.option].on}") turns it on'
        if self.state is State.PATCHED and target is not None:
            never = ONLY_FALLBACKS if self.fallbacks else NEVER_CALLED
            return target.uncounted or ("" if self.hits else never)
        if target is None or self.state not in UNREPLACED:
            return ""
        why = target.mismatch(self.found) if self.found else ""
        if self.state is State.REFUSED:
            return why or "nf4_patch raised an error, see the log"
        theirs = "another library put its own function in place"
        return f"{theirs}, which cannot be replaced: {why}" if why else f"{theirs}; call enable() again to replace it"


@dataclass(frozen=True)
class WeightStatus:
    """The launches of one kernel for weights of one shape."""

    shape: tuple[int, ...]
    dtype: str  # "bfloat16"
    kernel: str  # "" for the dequantization, or the name of the kernel
    hits: int
    weights: int  # number of weights that were dequantized so far


@dataclass(frozen=True)
class Status:
    """A snapshot of the patch in this process."""

    enabled: bool
    targets: tuple[TargetStatus, ...]  # includes functions of this package that were called, such as ``dequantize_nf4``
    shapes: tuple[WeightStatus, ...] = ()
    errors: tuple[str, ...] = ()  # full messages of kernel failures, and details of other Reasons
    cache: CacheStatus = field(default_factory=CacheStatus)
    offload: dict[str, OffloadStatus] = field(default_factory=dict)  # by GPU
    graphs: GraphsStatus = field(default_factory=GraphsStatus)
    activations: ActivationsStatus = field(default_factory=ActivationsStatus)
    matmul: tuple[MatmulStatus, ...] = ()  # measurements of the fused matmul
    options: dict[str, Effect] = field(default_factory=dict)  # by the option's name
    gpus: int | None = None  # number of GPUs that PyTorch can use; None if torch is not imported
    forbidden: str = ""  # the variables that keep the patch off, "NF4_PATCH=0" for example

    @property
    def hits(self) -> int:
        """Return the number of kernel launches."""
        return sum(target.hits for target in self.targets)

    @property
    def dequantizations(self) -> int:
        """Return how many dequantizations ran in the kernel."""
        return sum(each.hits for each in self.shapes if not each.kernel)

    @property
    def fallbacks(self) -> int:
        """Count dequantizations that ran the original although the kernel would be faster. ``options`` has all other fallbacks."""
        core = [target for target in self.targets if is_core(target)]
        every = (item for target in core for item in target.fallbacks.items())
        return sum(count for name, count in every if not Reason[name].is_expected)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        on = "on" if self.enabled else f"off ({self.forbidden})" if self.forbidden else "off"
        lines = [f"nf4_patch is {on}: {self.dequantizations} dequantizations in the kernel, {self.fallbacks} fell back"]
        if self.enabled and self.gpus == 0 and not self.hits:
            lines.append(f"  {NO_GPU} ({Reason.NOT_CUDA.name})")
        told: set[str] = set()  # Reasons that were explained
        for target in self.targets:
            if (is_core(target) and target.calls) or target.state in TROUBLES:
                note = f" ({target.note})" if target.note else ""
                lines.append(f"  {target.name}: {target.state}, {target.hits} hits{note}")
                if is_core(target):
                    lines += [f"    {count} x {explain(reason, told)}" for reason, count in target.fallbacks.items()]
        for name, option in OPTIONS.items():
            effect = self.options.get(name, Effect())
            is_counted = option.calls and (effect.value != "off" or effect.calls)
            if effect.lacks or is_counted or is_idle(option, effect, getattr(self, name, None)):
                lines.append(f"  {line(name, effect, told)}")
            lines += [f"  {each}" for each in option.lines(getattr(self, name))] if option.lines else []
        called = any(target.calls for target in self.targets) or any(each.calls for each in self.options.values())
        if self.enabled and not called:
            patched = sum(target.state.was_patched for target in self.targets)
            lines.append(f"  nothing was called yet; {patched} functions are replaced{waiting(self.targets)}")
        for error in self.errors:
            is_detail = error.partition(":")[0] in Reason.__members__
            lines.append(f"  {error}" if is_detail else f"  error: {error}")
        return "\n".join(lines)


def is_core(status: TargetStatus) -> bool:
    """Return whether the target's calls count whenever the patch is on."""
    return status.name not in ROWS or not ROWS[status.name].option


def waiting(targets: tuple[TargetStatus, ...]) -> str:
    libraries = dict.fromkeys(waited_for(target) for target in targets if target.state is State.WAITING)
    return f", others wait for the import of {', '.join(libraries)}" if libraries else ""


def waited_for(status: TargetStatus) -> str:
    """Return the library that still has to be imported, or the target's module if the library is imported already."""
    target = ROWS[status.name]
    return target.module if target.library in sys.modules else target.library


def calls_of(name: str) -> tuple[int, dict[str, int]]:
    return counters.hits(name), {r.name: n for (target, r), n in list(counters.fallbacks.items()) if target == name}


def status_of(target: Target) -> TargetStatus:
    entry = installed.get(target.name)
    hits, fallbacks = calls_of(target.name)
    state = State.ABSENT if target.trigger in sys.modules else State.WAITING
    if entry is not None:
        state = entry.state()
    if not switch.on and state not in (State.WAITING, State.REFUSED):
        state = State.OFF
    elif state.was_patched and target.option and not switch.wants(target):
        state = State.INACTIVE
    found = unsupported(target, entry.current()) if entry is not None and state in UNREPLACED else ""
    return TargetStatus(target.name, state, hits, fallbacks, found)


def status() -> Status:
    """Return a snapshot of patched targets, hits, fallbacks and the effects of options in this process."""
    targets = {target.name: status_of(target) for target in TARGETS}
    for name in [key[0] for key in list(counters.hit_counters)] + [key[0] for key in list(counters.fallbacks)]:
        if (
            name not in targets
            and name not in OPTIONS
            and (own := TargetStatus(name, State.OWN, *calls_of(name))).calls
        ):
            targets[name] = own
    hits: Counter[tuple[tuple[int, ...], str, str]] = Counter()
    addresses: dict[tuple[tuple[int, ...], str, str], set[int]] = {}
    for (_, shape, dtype, kernel), counter in list(counters.hit_counters.items()):
        hits[shape, dtype, kernel] += counter.hits
        addresses.setdefault((shape, dtype, kernel), set()).update(counter.addresses)
    shapes = tuple(
        WeightStatus(*key, hits=count, weights=len(addresses[key])) for key, count in hits.most_common() if count
    )
    reports = {name: option.report(switch.value(name)) for name, option in OPTIONS.items() if option.report}
    return Status(
        switch.on, tuple(targets.values()), shapes, tuple(counters.errors), options=effects(), gpus=gpus(),
        forbidden=keeps_off(), **reports,
    )  # fmt: skip


def gpus() -> int | None:
    """Return ``torch.cuda.device_count()``, which does not initialize CUDA, or None if torch is not imported."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return None if cuda is None else int(cuda.device_count())
