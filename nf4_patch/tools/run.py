"""Enable the patch, then run somebody's script or module as Python would."""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import runpy
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from rich.console import RenderableType

import nf4_patch

from ..config import is_first_process
from ..patching.state import State
from ..patching.status import Status, explain
from . import output
from .report import Report, plural

# Files whose frames are above the script's own in a traceback.
FROZEN = ("runpy", "importlib._bootstrap", "importlib._bootstrap_external")
OUR_FRAMES = (__file__, runpy.__file__, *(f"<frozen {name}>" for name in FROZEN))
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # per element

# What starts the processes that train, as it is named after ``run``; and how each of them gets a report instead.
LAUNCHERS = dict.fromkeys(
    ("torch.distributed.run", "torch.distributed.launch", "torchrun"), "torchrun --no-python"
) | dict.fromkeys(("accelerate.commands.launch", "accelerate"), "accelerate launch --no_python")


@dataclass
class RunReport(Report):
    """How a run ended and what it did with its 4-bit weights. Counts are of this process, not of its children."""

    command: list[str]
    enabled: bool  # False: NF4_PATCH=0 or NF4_USE_TRITON=0 forbade it
    code: int
    seconds: float
    status: Status
    shown: bool  # --report

    @property
    def exit_code(self) -> int:
        return self.code

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["shown"]
        reasons = [
            f"{t.name}: {count:,} x {explain(name)}" for t in self.status.targets for name, count in t.fallbacks.items()
        ]
        return {**fields, "advice": reasons + self.advice(), "exit_code": self.exit_code}

    def advice(self) -> list[str]:
        """What to know and what to do beyond what the status says, most important first."""
        targets, lines = self.status.targets, []
        if not self.enabled:
            lines.append("The patch was off: NF4_PATCH=0 or NF4_USE_TRITON=0 is set.")
        elif not any(target.state.in_place or target.state is State.OFF for target in targets):
            lines.append(
                "Nothing was patched: this process imported neither bitsandbytes nor Unsloth, or they were refused."
            )
        elif not any(target.calls for target in targets):
            lines.append("Nothing that is patched was called by eager code. Calls by compiled code are not counted.")
        if "unsloth" in sys.modules:
            from ..patching import deferral  # imports torch, which Unsloth has

            kept = deferral.own_kernel("unsloth") and deferral.deferred("unsloth", compiling=True)
            lines += [deferral.KEPT["unsloth"]] if kept else []
        program = self.command[1] if self.command[0] == "-m" else os.path.basename(self.command[0])
        if launcher := LAUNCHERS.get(program):
            lines.append(
                "The processes that it started are not counted. For a report of rank 0: "
                f"`{launcher} nf4-patch run --report train.py`."
            )
        return lines

    def render(self) -> Iterable[RenderableType]:
        if not self.shown:
            return
        yield f"nf4_patch: {' '.join(self.command)} (exit {self.code}, {self.seconds:.1f} s)"
        yield str(self.status)
        yield from of_the_cache(self.status)
        yield from self.advice()


def of_the_cache(status: Status) -> list[str]:
    """Without a cache, which budget would have saved what: in proportion to it, and more with checkpointing."""
    if status.cache.mode != "off" or not status.weights:
        return []
    from ..patching.cache.allocator import allocated  # imports torch, which the run has

    weights = sum(status.weights.values())
    reads = sum(status.shapes[shape] for shape in status.weights)
    size = 0
    for shape, count in status.weights.items():
        sides, dtype = shape.split()  # "4096x4096 bfloat16"
        size += count * allocated(math.prod(map(int, sides.split("x"))) * BYTES[dtype])
    saved = 1 - weights / max(reads, 1)
    if saved <= 0:
        return []
    half = f'cache="{size / 2 / 2**30:.2f}GiB" at least {saved / 2:.0%}'
    return [
        f"cache: {plural(weights, 'weight')} would take {size / 2**30:.2f} GiB dequantized; "
        f"enable(cache=...) of that size would have saved {saved:.0%} of the dequantizations, {half}; "
        'cache="auto" finds a size'
    ]


def run(module: bool, arguments: Sequence[str], shown: bool = False) -> RunReport:
    """Run ``arguments[0]``, a script or a module, as ``__main__``, with the patch on.

    sys.argv, sys.path[0] and __main__ are what ``python`` would make them, and stay so: atexit handlers and daemon threads
    of the run outlive it. Other threads are waited for, as at the interpreter's end, and none can be started afterwards.
    What the run raises is reported as the interpreter would, on stderr; the report carries the exit code. Children are
    patched through NF4_PATCH=1 in the environment.

    Raises:
        OSError: the script cannot be read.
        SystemExit: this is a forked child, or a launcher's process of another rank than 0: it has no report.
    """
    start = _starter(module, arguments[0])
    enabled = nf4_patch.enable()
    if enabled:
        os.environ["NF4_PATCH"] = "1"
    started = time.perf_counter()
    sys.argv = list(arguments)  # runpy puts a module's file in place of its name
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = builtins
    process = os.getpid()
    code = output.flushed(_exit_code(start))
    if os.getpid() != process or not is_first_process():
        sys.exit(code)
    command = [*["-m"] * module, *arguments]
    seconds, status = time.perf_counter() - started, nf4_patch.status()
    return RunReport(command, enabled, code, seconds, status, shown)


def _starter(module: bool, name: str) -> Callable[[], Any]:
    """What runs a module, or a script, or a folder or zip file with a __main__.py, in the ``__main__`` of sys.modules.

    Raises:
        OSError: it cannot be read.
    """
    path = os.path.abspath(name)
    if module or os.path.isdir(path) or zipfile.is_zipfile(path):

        def start() -> None:
            _lead_path_with(os.getcwd() if module else path, even_if_safe=not module)
            runpy._run_module_as_main(name if module else "__main__", alter_argv=module)  # type: ignore[attr-defined]

        return start
    loader = SourceFileLoader("__main__", path)
    data = loader.get_data(path)

    def execute() -> None:
        _lead_path_with(os.path.dirname(os.path.realpath(path)))
        main = sys.modules["__main__"].__dict__
        main.update(__file__=path, __cached__=None, __loader__=loader)
        exec(loader.source_to_code(data, path), main)

    return execute


def _lead_path_with(directory: str, even_if_safe: bool = False) -> None:
    """Make it the first entry of sys.path; python -P ("safe path") has none for a script's folder or the working directory."""
    safe = getattr(sys.flags, "safe_path", False)
    if even_if_safe or not safe:
        sys.path[0 : 0 if safe else 1] = [directory]


def _exit_code(start: Callable[[], Any]) -> int:
    """That of the run, also after its threads; what it raises is printed as the interpreter would."""
    raised = None
    try:
        start()
    except BaseException as error:
        raised = error  # handled below: what its excepthook raises has no context
    code = 0 if raised is None else _ended(raised)
    with contextlib.suppress(KeyboardInterrupt):  # as the interpreter, which goes on to its end
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons: they may train
    return code


def _ended(error: BaseException) -> int:
    """Print what ended a run as the interpreter would: its exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    try:
        _show(error, sys.excepthook)
    except SystemExit as exit:
        return _ended(exit)
    except BaseException as another:
        print("Error in sys.excepthook:", file=sys.stderr)
        _show(another, sys.__excepthook__)
        print("\nOriginal exception was:", file=sys.stderr)
        _show(error, sys.__excepthook__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _show(error: BaseException, hook: Callable[..., Any]) -> None:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in OUR_FRAMES:
        traceback = traceback.tb_next  # to the script's own first frame
    hook(type(error), error.with_traceback(traceback), traceback)
