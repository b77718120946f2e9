"""``nf4-patch doctor``: check which targets would be patched on this machine, and why others would not be."""

from __future__ import annotations

import importlib
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import nf4_patch

from ..graphs.option import WAIT_FOR_PYTHON
from ..libraries.bitsandbytes import cpu
from ..libraries.unsloth import DEQUANTIZE
from ..libraries.unsloth import adapters as unsloth_adapter
from ..matmul.choice import has_table
from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.weight import OUTPUT_DTYPES
from ..options import OPTIONS
from ..patching.config import VARIABLES, Config, options_set, unknown_variables
from ..patching.option import size_in_words
from ..patching.reasons import Reason
from ..patching.state import State
from ..patching.target import Target
from ..patching.targets import TARGETS
from ..snapshot import TargetStatus
from ..version import holds, release_of
from . import advice
from .offload import lines as offload_lines
from .report import DISTRIBUTIONS, Progress, Report, driver, installed_releases, plural, silent, why_no_gpu

TAKE_FP16 = (
    "PyTorch emulates bf16 on this GPU, which is slow. Use bnb_4bit_compute_dtype=torch.float16 and fp16=True "
    "(the kernel itself is as exact in bf16 as in fp16). transformers ignores that dtype for a checkpoint that is already in "
    'bf16 and 4 bits: use enable("fast") and fp16=True there'
)
LAZY = ("transformers", "liger_kernel")  # libraries that import their modules on first use
BRIEFLY = (State.INACTIVE, State.ABSENT)  # targets in these states are only counted, not listed
OLDEST = TARGETS[0]  # a function of bitsandbytes that every supported release has
AUTOLOADS = ">= 0.46"  # releases of bitsandbytes that load nf4_patch as a backend


@dataclass
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    gibibytes: float
    advice: str = ""
    failures: list[str] = field(default_factory=list)  # why this GPU runs the original
    kernels: dict[str, str] = field(default_factory=dict)  # KernelEntry.launch_path of the kernel for each output dtype
    fused_matmul: str = "never"  # a phrase that says when the fused matmul runs on this GPU

    @property
    def sm(self) -> str:
        return "sm_{}{}".format(*self.capability)

    def lines(self, verbose: bool) -> Iterable[str]:
        yield f"GPU {self.index}: {self.name}, {self.sm}, {self.gibibytes:.0f} GiB"
        if self.advice:
            yield f"  {self.advice}"
        if verbose:
            for dtype, by in self.kernels.items():
                yield f"  kernel for {dtype}: bit-identical to the reference, launched by {by}"
            yield f"  fused matmul: {self.fused_matmul}"


@dataclass
class Judged:
    """The state that a target would have in a training run on this machine."""

    name: str
    state: State
    note: str = ""


@dataclass
class DoctorReport(Report):
    machine: str
    releases: dict[str, str]
    gpus: list[Gpu]
    no_gpu: str  # why no GPU can be used, "" if one can
    targets: list[Judged]
    limits: list[str]  # which calls of patched targets do not get faster, and what to do
    variables: list[str]  # the NF4_* variables that are set, with remarks
    lines: dict[str, str] = field(default_factory=dict)  # the line to type, by its purpose
    verbose: bool = False  # show every target and kernel
    cpu: str = ""  # the fault of bitsandbytes on this CPU
    offload: tuple[str, ...] = ()  # what to type for the model that was named

    def problems(self) -> list[str]:
        """Return the reasons why calls would run the original."""
        problems = [f"{self.no_gpu}: every call would run the original ({Reason.NOT_CUDA.name})"] * bool(self.no_gpu)
        problems += [f"{target.note} keeps the patch off" for target in self.targets if target.state is State.OFF]
        failing = [gpu for gpu in self.gpus if gpu.failures]
        problems += [f"GPU {gpu.index} ({gpu.name}) runs the original: {'; '.join(gpu.failures)}" for gpu in failing]
        refused = [target for target in self.targets if target.state is State.REFUSED]
        problems += [t.note if t.note.startswith("import ") else f"{t.name} is not patched: {t.note}" for t in refused]
        release = self.releases.get("bitsandbytes")
        if release is None:
            problems.append("bitsandbytes is not installed, so there is nothing to patch: pip install bitsandbytes")
        elif not holds(release, OLDEST.releases):
            problems.append(f"bitsandbytes {release} is too old: nf4_patch needs {OLDEST.releases}")
        return list(dict.fromkeys(problems))

    @property
    def outcome(self) -> str:
        return "Not ready" if self.problems() else "Ready, with limits" if self.limits else "Ready"

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "outcome": self.outcome}

    def render(self) -> Iterable[str]:
        verdicts = self.problems() or self.limits or ["the kernel would run for every installed target."]
        unmeasured = sorted({gpu.sm for gpu in self.gpus if gpu.capability not in compilation.MEASURED})
        if unmeasured and not self.problems():
            how = "Run `nf4-patch doctor --measure` to measure it"
            verdicts = [*verdicts, f"speed on {', '.join(unmeasured)} has not been measured. {how}."]
        yield from (f"{self.outcome}: {verdict}" for verdict in verdicts)
        if self.lines and not self.problems():
            yield ""
            yield "What to type:"
            yield from (f"  {who + ':':25}{line}" for who, line in self.lines.items())
        yield ""
        yield from self.offload
        for gpu in self.gpus:
            yield from gpu.lines(self.verbose)
        yield f"nf4_patch {nf4_patch.__version__}, {self.machine}"
        yield ", ".join(f"{name} {release}" for name, release in self.releases.items())
        yield from self.variables
        if self.cpu:
            yield self.cpu
        if self.verbose:
            yield from self.details()
        else:
            yield "nf4-patch doctor -v shows every function and kernel."

    def details(self) -> Iterable[str]:
        if missing := [name for name in DISTRIBUTIONS if name not in self.releases]:
            yield f"not installed: {', '.join(missing)}"
        yield ""
        for target in self.targets:
            if target.state not in BRIEFLY:
                yield f"{target.state}: {target.name}"
                yield f"  {target.note or next(row.covers for row in TARGETS if row.name == target.name)}"
        rest = Counter(f"{target.state} ({target.note})" for target in self.targets if target.state in BRIEFLY)
        yield f"{plural(rest.total(), 'more target')}:"
        yield from (f"  {count} {kind}" for kind, count in rest.items())


def examine(unsloth: bool = False, tell: Progress = silent, verbose: bool = False, offload: str = "") -> DoctorReport:
    """Examine the machine: compile the kernels, and enable the patch for a moment to look at the targets.

    With ``unsloth``, import it too, which takes 8 s and patches other libraries. The report says which ``offload=`` the
    model ``offload``, a name or folder, needs.

    Raises:
        ConfigError: an NF4_* variable has an unknown value.
    """
    config = Config.read()
    no_gpu, nvidia = why_no_gpu(), driver()
    releases = installed_releases()
    gpus = [] if no_gpu else [examine_gpu(index, tell) for index in range(torch.cuda.device_count())]
    targets, limits = examine_targets(unsloth, config, tell)
    lines = lines_to_type(releases, gpus)
    return DoctorReport(
        f"Python {platform.python_version()}, {platform.platform()}" + f", NVIDIA driver {nvidia}" * bool(nvidia),
        releases, gpus, no_gpu, targets, limits, variables_in_force(config), lines, verbose,
        fault_on_the_cpu(), tuple(offload_lines(offload, [(each.index, int(each.gibibytes * 2**30)) for each in gpus]) if offload else ()),
    )  # fmt: skip


def lines_to_type(releases: dict[str, str], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the lines that the user should type, by their purpose.

    GPUs that wait for Python get settings for SFTConfig. A mixture has to fit on the GPU with the least memory.
    """

    def has(name: str, condition: str) -> bool:
        return name in releases and holds(releases[name], condition)

    lines = {"to train faster": f"nf4_patch.{advice.DENSE.line}", "or with the same bits": "nf4_patch.enable()"}
    if has("transformers", ">= 4.53") and any(gpu.capability >= WAIT_FOR_PYTHON for gpu in gpus):
        lines["also in SFTConfig"] = advice.SETTINGS
        if has("unsloth", ">= 2026.10"):
            lines["or with Unsloth"] = advice.UNSLOTH
    if any(gpu.capability < WAIT_FOR_PYTHON for gpu in gpus):  # these GPUs have no bf16
        lines["on a T4 or RTX 20 also"] = advice.OLD.also
        if has("unsloth", ">= 2026.10"):
            lines["on a T4 with Unsloth"] = f"nf4_patch.{advice.OLD_UNSLOTH.line}"
    if not (has("transformers", ">= 5.17") and has("peft", ">= 0.17")):
        return lines | {"mixtures of experts": "upgrade to transformers 5.17, peft 0.17 or newer"}
    fits = advice.mixture(min((gpu.gibibytes * 1.073741824 for gpu in gpus), default=math.inf))
    lines["mixtures of experts"] = f"nf4_patch.{fits.line}" if fits else "Qwen3-30B-A3B does not fit, even with offload"
    if fits and fits is not advice.MIXTURES[0]:
        lines["for Qwen3-30B-A3B also"] = ", ".join([*fits.model.split(", ")[1:], fits.also])  # the rank of LoRA
    return lines


def variables_in_force(config: Config) -> list[str]:
    lines = []
    for variable in VARIABLES:
        if value := os.environ.get(variable.name):
            words = f" ({size_in_words(int(value))})" if variable.size and value.isdigit() else ""
            lines.append(f"{variable.name}={value}{words}: {variable.meaning}")
    if (options := options_set()) and not (config.requested or config.forbidden):
        lines.append(f"{', '.join(options)}: no effect until NF4_PATCH=1 or nf4_patch.enable() turns the patch on")
    bitsandbytes = release_of("bitsandbytes")
    if config.requested and bitsandbytes and not holds(bitsandbytes, AUTOLOADS):
        how = "Start the program with `nf4-patch run`, or import nf4_patch in it"
        lines.append(f"NF4_PATCH=1: bitsandbytes {bitsandbytes} does not load nf4_patch ({AUTOLOADS} does). {how}")
    return [*lines, *unknown_variables()]


def fault_on_the_cpu() -> str:
    if "bitsandbytes" not in sys.modules or not cpu.misreads_rows():
        return ""
    return (
        f"{cpu.why_wrong()}. While the patch is on, dequantize_4bit, model.dequantize() and merges are right there, but layers "
        "still multiply wrongly. Train and evaluate such models on a GPU"
    )


def examine_gpu(index: int, tell: Progress) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    gpu = Gpu(index, properties.name, capability, properties.total_memory / 2**30)
    if capability < compilation.MINIMUM_CAPABILITY:
        gpu.failures.append(Reason.GPU_TOO_OLD.sentence)
        return gpu
    gpu.advice = TAKE_FP16 if capability < (8, 0) else ""
    for done, dtype in enumerate(OUTPUT_DTYPES):
        tell(f"compiling for {properties.name}", done, len(OUTPUT_DTYPES))
        name = str(dtype).removeprefix("torch.")
        usual = compilation.Variant(compilation.warps_for(capability, 4096 * 4096), dtype)  # nested, blocksize 64
        try:  # compiling a kernel also compares it with the reference
            gpu.kernels[name] = compilation.kernel_for(usual, torch.device("cuda", index)).entry.launch_path
        except runtime.KernelUnavailable as unavailable:
            gpu.failures.append(f"{name}: {unavailable}")
    measured = "where a measurement at the first use of a size shows it faster"
    gpu.fused_matmul = "by the shipped table" if has_table(capability) else measured
    return gpu


def examine_targets(unsloth: bool, config: Config, tell: Progress) -> tuple[list[Judged], list[str]]:
    """Import the libraries. Return the targets' states, and sentences about calls that would not get faster."""
    # Libraries are imported in the order of TARGETS, because unsloth_zoo cannot be imported before unsloth.
    installed = installed_releases(dict.fromkeys(target.library for target in TARGETS))
    failures = {}
    for name, release in installed.items():
        if name.startswith("unsloth") and not unsloth:
            continue
        tell(f"importing {name}")
        lazy = [t.module for t in TARGETS if t.library == name in LAZY and holds(release, t.releases)]
        try:
            for module in (name, *lazy):
                importlib.import_module(module)
        except Exception as error:  # a broken library is a finding, not a crash of the doctor
            failures[name] = f"import {name} fails: {type(error).__name__}: {error}"
    judged = []
    limits: list[str] = []
    with nf4_patch.enabled():
        for target, status in zip(TARGETS, nf4_patch.status().targets, strict=False):
            release = installed.get(target.library, "")
            judged.append(judge(target, release, status, failures.get(target.library, ""), config))
            limits += kept(target, release, judged[-1].state)
    return judged, list(dict.fromkeys(limits))


def judge(target: Target, release: str, status: TargetStatus, failure: str, config: Config) -> Judged:
    """Return the state that a target would have in a training run.

    ``release`` of the library is "" if it is not installed. ``status`` is that while ``examine_targets`` had the patch
    on. ``failure`` says why the import failed, or is "".
    """
    library, waiting = target.library, status.state is State.WAITING
    option = OPTIONS.get(target.option)
    options = [each for each in (target.option, target.or_option) if each]
    switched_off = option is not None and all(config.options[each] == "off" for each in options)
    tested = release.partition("+")[0] in target.tested
    cases = (
        (not release, State.ABSENT, f"{library} is not installed"),
        (not holds(release, target.releases), State.ABSENT, f"only in {library} {target.releases}"),
        (failure, State.REFUSED, failure),
        (config.forbidden, State.OFF, config.forbidden),
        (switched_off, State.INACTIVE, f"only with {option.name}={option.on}" if option else ""),
        (status.state is State.REFUSED, State.REFUSED, status.note),
        (status.state is State.ABSENT, State.REFUSED, f"{library} {release} has no such function"),
        (waiting and library in sys.modules, State.WAITING, f"{library} imports {target.module} only on a GPU"),
        (not tested, status.state, f"tested with {', '.join(target.tested)}, not with this release"),
        (waiting, State.WAITING, f"patched when {library} is imported; --unsloth imports it to check"),
        (True, status.state, ""),
    )
    state, why = next((state, why) for is_so, state, why in cases if is_so)
    return Judged(target.name, state, why)


def kept(target: Target, release: str, state: State) -> list[str]:
    """Say which calls of a target still run Unsloth's own kernel, and what to do about it."""
    if target.replace != DEQUANTIZE or not (state.was_patched or state is State.WAITING):
        return []
    own = unsloth_adapter
    by_release = holds(release, own.OWN_KERNEL_RELEASES) and os.environ.get("UNSLOTH_BNB_TRITON") != "0"
    if not (own.uses_own_kernel() if state.was_patched else by_release):
        return []
    eager = f"Eager calls of {target.name} keep {target.library}'s kernel too, because no benchmark shows nf4_patch faster on this GPU."
    return [own.OWN_KERNEL_ADVICE, *[eager] * own.keeps_eager_calls()]
