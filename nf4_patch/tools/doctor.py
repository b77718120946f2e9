"""What would be patched on this machine, by what, and why not."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

import nf4_patch

from ..config import VARIABLES, Config, options_set, size_in_words
from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.matmul.tuning import SMALL_M_ROWS
from ..nf4.weight import OUTPUT_DTYPES
from ..patching import calibrated, deferral, placement
from ..patching.reasons import Reason
from ..patching.state import State, StrEnum
from ..patching.targets import SWITCHES, TARGETS, Target
from .report import DISTRIBUTIONS, Progress, Report, installed_releases, plural, silent

TAKE_FP16 = (  # of a GPU before sm_80
    "fp16 is right here: this GPU has no bf16 arithmetic and PyTorch emulates it, slowly. Take "
    "bnb_4bit_compute_dtype=torch.float16 and fp16=True; the kernel itself writes bf16 as exactly as fp16"
)


class Verdict(StrEnum):
    """What would happen to a target here."""

    PATCHED = "patched"
    WOULD_BE_PATCHED = "would be patched"
    EAGER_ONLY = "eager calls only"  # compiled code keeps the library's own kernel
    DEFERRED = "deferred"  # every call keeps the library's own kernel
    INACTIVE = "inactive"
    REFUSED = "refused"
    OFF = "off"
    NOT_HERE = "not here"
    NOT_IN_THIS_RELEASE = "not in this release"
    NOT_INSTALLED = "not installed"


class Outcome(StrEnum):
    READY = "Ready"
    LIMITED = "Ready, with limits"  # patched, and not everything gains by it
    NOT_READY = "Not ready"


BRIEFLY = (Verdict.INACTIVE, Verdict.NOT_IN_THIS_RELEASE, Verdict.NOT_INSTALLED)  # counted in one line


@dataclass
class KernelCheck:
    """The kernel of one output dtype, compiled on one GPU and compared there with the reference."""

    dtype: str
    works: bool
    launch_path: str  # how it is launched: "c entry" or "launcher"
    seconds: float  # to compile (or load from Triton's cache) and check
    error: str = ""


@dataclass
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    gibibytes: float
    advice: str = ""
    kernels: list[KernelCheck] = field(default_factory=list)
    fused_matmul: str = ""  # what decides where it runs

    @property
    def works(self) -> bool:
        return bool(self.kernels) and all(check.works for check in self.kernels)


@dataclass
class Judged:
    """A target, and what would happen to it here."""

    target: str
    covers: str
    release: str  # of the library; "" where it is not installed
    verdict: Verdict
    why: str = ""


@dataclass
class DoctorReport(Report):
    machine: str
    driver: str
    releases: dict[str, str]
    gpus: list[Gpu]
    no_gpu: str  # why there is none
    targets: list[Judged]
    variables: dict[str, str]  # those in force
    forbidden: bool
    missing: str = ""  # what is said of a calibration file that does not exist
    requested: bool = False  # NF4_PATCH=1

    def problems(self) -> list[str]:
        """Why calls would run the original; empty where the kernel would run for every installed target."""
        found = []
        if self.no_gpu:
            found.append(f"{self.no_gpu}: every call would run the original ({Reason.NOT_CUDA.name})")
        if self.forbidden:
            found.append("NF4_PATCH=0 or NF4_USE_TRITON=0 keeps the patch off")
        for gpu in self.gpus:
            errors = [f"{check.dtype}: {check.error}" for check in gpu.kernels if not check.works]
            if not gpu.works:
                found.append(f"GPU {gpu.index} ({gpu.name}) runs the original: {'; '.join(errors) or gpu.advice}")
        found += [f"{j.target} is left alone: {j.why}" for j in self.targets if j.verdict is Verdict.REFUSED]
        if not any(judged.release for judged in self.targets):
            found.append("neither bitsandbytes nor Unsloth is installed: there is nothing to patch")
        return found

    def limits(self) -> list[str]:
        """What is patched and yet keeps a kernel of its library's, with what to do."""
        found = []
        for judged in self.targets:
            if judged.verdict in (Verdict.EAGER_ONLY, Verdict.DEFERRED):
                found.append(deferral.KEPT[judged.target.partition(".")[0]])
            if judged.verdict is Verdict.DEFERRED:
                found.append(f"{judged.target} leaves its eager calls to its library too: {judged.why}.")
        return list(dict.fromkeys(found))

    @property
    def outcome(self) -> Outcome:
        return Outcome.NOT_READY if self.problems() else Outcome.LIMITED if self.limits() else Outcome.READY

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "outcome": self.outcome, "limits": self.limits()}

    def render(self) -> Iterable[RenderableType]:
        yield f"nf4_patch {nf4_patch.__version__}, {self.machine}"
        yield ", ".join(f"{name} {release}" for name, release in self.releases.items())
        if missing := [name for name in DISTRIBUTIONS if name not in self.releases]:
            yield f"not installed: {', '.join(missing)}"
        if self.driver:
            yield self.driver
        yield from self._gpus()
        yield from self._targets()
        for name, value in self.variables.items():
            words = f" ({size_in_words(int(value))})" if name == "NF4_PATCH_CACHE" and value.isdigit() else ""
            yield f"{name}={value}{words}: {next(v.meaning for v in VARIABLES if v.name == name)}"
        if (options := options_set()) and not self.requested and not self.forbidden:
            yield f"{', '.join(options)}: no effect until NF4_PATCH=1 or nf4_patch.enable() switches the patch on"
        if self.missing:
            yield self.missing
        yield ""
        yield from (f"{self.outcome}: {problem}" for problem in self.problems())
        if self.no_gpu:
            yield "`nf4-patch verify` runs the kernel here under Triton's interpreter."
        if self.outcome is Outcome.READY:
            yield f"{self.outcome}: the kernel would run for every installed target."
        if self.outcome is Outcome.LIMITED:
            patched = f'"{Verdict.PATCHED}" or "{Verdict.WOULD_BE_PATCHED}"'
            yield f"{self.outcome}: the kernel would run for the targets above that are {patched}."
        yield from self.limits()

    def _gpus(self) -> Iterable[str]:
        for gpu in self.gpus:
            yield f"GPU {gpu.index}: {gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.gibibytes:.0f} GiB"
            for check in gpu.kernels:
                result = "the bits of the reference" if check.works else "FAILED"
                path = f", launched by {check.launch_path}" if check.launch_path else ""
                yield f"  kernel for {check.dtype}: {result}{path}, ready in {check.seconds * 1e3:,.0f} ms"
            if gpu.fused_matmul:
                yield f"  fused matmul: {gpu.fused_matmul}"
            if gpu.advice:
                yield f"  {gpu.advice}"

    def _targets(self) -> Iterable[str]:
        """Those that matter, and the rest in one line."""
        rest: Counter[tuple[Verdict, str]] = Counter()
        for judged in self.targets:
            if judged.verdict in BRIEFLY:
                rest[judged.verdict, judged.why or judged.target.partition(".")[0]] += 1
            else:
                yield f"{judged.verdict}: {judged.target}"
                yield f"  {judged.why or judged.covers}"
        if rest:
            kinds = ", ".join(f"{count} {verdict} ({why})" for (verdict, why), count in rest.items())
            yield f"{plural(rest.total(), 'more target')}: {kinds}"


def examine(unsloth: bool = False, tell: Progress = silent) -> DoctorReport:
    """Look at the machine, compile the kernels, put the patch in place and take it out again.

    Args:
        unsloth: import Unsloth too. It takes 8 s and patches other libraries; without it its release decides.

    Raises:
        nf4_patch.config.ConfigError: a NF4_* variable has an unknown value.
    """
    config = Config.read()
    calibrated.use(config)
    gpus = [examine_gpu(index, tell) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    return DoctorReport(
        machine=f"Python {platform.python_version()}, {platform.platform()}",
        driver=driver() if torch.cuda.is_available() else "",
        releases=installed_releases(),
        gpus=gpus,
        no_gpu=why_no_gpu() if not gpus else "",
        targets=examine_targets(unsloth, config, tell),
        variables={v.name: os.environ[v.name] for v in VARIABLES if os.environ.get(v.name)},
        forbidden=config.forbidden,
        missing=config.missing_calibration(),
        requested=config.requested,
    )


def driver() -> str:
    file = Path("/proc/driver/nvidia/version")  # which Windows and WSL do not have
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text() if file.exists() else "")
    return f"NVIDIA driver {found[1] if found else 'unknown'}, CUDA {torch.version.cuda} in torch"


def why_no_gpu() -> str:
    if torch.version.hip is not None:
        return Reason.ROCM.sentence
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU (nvidia-smi shows whether the driver does)"


def examine_gpu(index: int, tell: Progress) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    gpu = Gpu(index, properties.name, capability, properties.total_memory / 2**30)
    if capability < compilation.MINIMUM_CAPABILITY:
        gpu.advice = f"every call runs the original: {Reason.GPU_TOO_OLD.sentence}"
    elif torch.version.hip is None:
        gpu.advice = TAKE_FP16 if capability < (8, 0) else ""
        for done, dtype in enumerate(OUTPUT_DTYPES):
            tell(f"compiling for {properties.name}", done, len(OUTPUT_DTYPES))
            gpu.kernels.append(check_kernel(dtype, torch.device("cuda", index), capability))
        shipped = any(row.capability == capability for row in SMALL_M_ROWS)
        gpu.fused_matmul = calibrated.in_force(index).status or (
            "by the shipped tables" if shipped else "in no shipped table; `nf4-patch calibrate` measures them"
        )
    return gpu


def check_kernel(dtype: torch.dtype, device: torch.device, capability: tuple[int, int]) -> KernelCheck:
    """Compile the variant of a usual weight (nested, blocksize 64); it compares its own bits with the reference."""
    variant = compilation.Variant(compilation.warps_for(capability, 4096 * 4096), dtype)
    name = str(dtype).removeprefix("torch.")
    started = time.perf_counter()
    path = error = ""
    try:
        path = compilation.kernel_for(variant, device).entry.launch_path
    except runtime.KernelUnavailable as unavailable:
        error = str(unavailable)
    return KernelCheck(name, not error, path, time.perf_counter() - started, error)


def examine_targets(unsloth: bool, config: Config, tell: Progress) -> list[Judged]:
    """Import the libraries, enable the patch, and ask what is in place; afterwards it is as it was."""
    # in the order of TARGETS: unsloth_zoo cannot be imported before unsloth
    installed = installed_releases(dict.fromkeys(target.library for target in TARGETS))
    wanted = [name for name in installed if unsloth or not name.startswith("unsloth")]
    failed = {}
    for name in wanted:
        tell(f"importing {name}")
        of_library = [t for t in TARGETS if t.lazy and t.library == name and holds(installed[name], t.releases)]
        try:
            for module in (name, *(target.module for target in of_library)):
                importlib.import_module(module)
        except Exception as error:  # a broken library is a finding, not a crash of the doctor
            failed[name] = f"import {name} fails: {type(error).__name__}: {error}"
    found = []
    with nf4_patch.enabled():
        for target, status in zip(TARGETS, nf4_patch.status().targets, strict=True):
            release = installed.get(target.library, "")
            verdict, why = judge(target, release, status.state, failed, config)
            found.append(Judged(target.name, target.covers, release, verdict, why))
    return found


def judge(target: Target, release: str, state: State, failed: dict[str, str], config: Config) -> tuple[Verdict, str]:
    """The verdict on a target, and why."""
    library = target.library
    if not release:
        return Verdict.NOT_INSTALLED, ""
    if library in failed:
        return Verdict.REFUSED, failed[library]
    if not holds(release, target.releases):
        return Verdict.NOT_IN_THIS_RELEASE, f"only {library} {target.releases}"
    if config.forbidden:
        return Verdict.OFF, "NF4_PATCH=0 or NF4_USE_TRITON=0"
    if target.only and getattr(config, target.only) == "off":
        return Verdict.INACTIVE, f"only with NF4_PATCH_{target.only.upper()}={SWITCHES[target.only]}"
    if state is State.REFUSED:
        return Verdict.REFUSED, placement.installed[target.name].refusal
    if state is State.ABSENT:
        return Verdict.REFUSED, f"{library} {release} has no such function"
    tested = "" if release in target.tested else f"tested with {', '.join(target.tested)}, not with this release"
    if state is State.WAITING and library in sys.modules:
        return Verdict.NOT_HERE, f"{library} imports {target.module} only where it finds a GPU"
    if not target.only and keeps_its_kernel(library, release, state):
        if deferral.deferred(library):
            can = "`nf4-patch calibrate` measures it" if library == "unsloth" else "NF4_PATCH_DEFER=never takes them"
            unmeasured = f"no benchmark shows ours faster on this GPU; {can}"
            return Verdict.DEFERRED, "NF4_PATCH_DEFER=always" if config.defer == "always" else unmeasured
        if deferral.deferred(library, compiling=True):
            return Verdict.EAGER_ONLY, f"compiled code keeps {library}'s own kernel"
    if state is State.WAITING:
        return Verdict.WOULD_BE_PATCHED, tested or "by its release; --unsloth imports it and looks"
    return Verdict.PATCHED, tested


def keeps_its_kernel(library: str, release: str, state: State) -> bool:
    """Whether the library has an NF4 kernel of its own: as it is imported, else by its release."""
    if library not in deferral.OWN_KERNEL:
        return False
    if state is not State.WAITING:
        return deferral.own_kernel(library)
    return holds(release, deferral.OWN_KERNEL[library]) and os.environ.get("UNSLOTH_BNB_TRITON") != "0"


def holds(release: str, condition: str) -> bool:
    """Whether a release meets a condition of targets.py, ">= 0.50" or "<= 2026.9.12"."""
    relation, bound = condition.split()
    a, b = (tuple(int(digits) for digits in re.findall(r"\d+", text)[:3]) for text in (release, bound))
    return a >= b if relation == ">=" else a <= b
