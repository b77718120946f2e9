"""Enable the patch, then run somebody's script or module as Python would."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

import nf4_patch

from ..patching.status import STANDING, Status, explain
from .estimate import seconds_saved
from .report import Report


@dataclass
class RunReport(Report):
    """How a run ended and what it did with its 4-bit weights. Counts are of this process, not of its children."""

    command: list[str]
    enabled: bool  # False: NF4_PATCH=0 or NF4_USE_TRITON=0 forbade it
    code: int
    seconds: float
    status: Status
    shown: bool  # --report
    saved: float | None = None  # seconds of GPU time, an estimate; None: nothing was measured to estimate it from

    @property
    def exit_code(self) -> int:
        return self.code

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["shown"]
        return {**fields, "advice": self.advice(), "exit_code": self.exit_code}

    def advice(self) -> list[str]:
        """What to know and what to do, most important first."""
        lines = []
        if not self.enabled:
            lines.append("The patch was off: NF4_PATCH=0 or NF4_USE_TRITON=0 is set.")
        for target in self.status.targets:
            for name, count in target.fallbacks.items():
                lines.append(f"{target.name}: {count} x {explain(name)}")
        standing = [target for target in self.status.targets if target.state in STANDING]
        lines += [f"{target.name}: {target.note}" for target in standing if target.note.startswith("installed")]
        if self.enabled and not standing:
            lines.append(
                "Nothing was patched: the run imported neither bitsandbytes nor Unsloth, or they were refused."
            )
        return lines + [f"kernel error: {error}" for error in self.status.errors]

    def render(self) -> Iterable[RenderableType]:
        if not self.shown:
            return
        table = Table(title=f"nf4_patch: {' '.join(self.command)} (exit {self.code}, {self.seconds:.1f} s)")
        for heading in ("target", "state", "hits", "fallbacks", "note"):
            table.add_column(heading, justify="right" if heading in ("hits", "fallbacks") else "left")
        for target in self.status.targets:
            fallbacks = sum(target.fallbacks.values())
            table.add_row(target.name, target.state, f"{target.hits:,}", f"{fallbacks:,}", target.note)
        yield table
        yield f"{self.status.hits:,} dequantizations in the kernel, {self.status.fallbacks:,} by the original"
        for shape, hits in sorted(self.status.shapes.items(), key=lambda item: -item[1]):
            if hits:
                yield f"  {hits:,} x {shape}"
        if self.saved is not None:
            yield f"about {self.saved:.2g} s of GPU time saved: an estimate, hits times the bench's table for this GPU"
        yield from self.advice()


def run(module: str | None, arguments: Sequence[str], shown: bool = False) -> RunReport:
    """Run ``arguments[0]`` as a script, or ``module``, as ``__main__``, with the patch on.

    sys.argv, sys.path[0] and __main__ are what ``python`` would make them. What the run raises is reported as
    the interpreter would, on stderr; the report carries the exit code. Children are patched through
    NF4_PATCH=1 in the environment.
    """
    enabled = nf4_patch.enable()
    if enabled:
        os.environ["NF4_PATCH"] = "1"
    started = time.perf_counter()
    before = sys.argv, sys.path[:]
    try:
        code = _as_main(module, arguments)
    finally:
        sys.argv, sys.path[:] = before
    command = ["-m", module, *arguments] if module else list(arguments)
    seconds, status = time.perf_counter() - started, nf4_patch.status()
    return RunReport(command, enabled, code, seconds, status, shown, seconds_saved(status))


def _as_main(module: str | None, arguments: Sequence[str]) -> int:
    """The exit code of the run."""
    try:
        if module is None:
            sys.argv = list(arguments)
            _lead_path_with(os.path.dirname(os.path.realpath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            sys.argv = [module, *arguments]  # runpy puts the module's file in place of its name
            _lead_path_with(os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        return _code_of(exit)
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 130
    except BaseException as error:
        error = error.with_traceback(_without_our_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _lead_path_with(directory: str) -> None:
    """The first entry of sys.path is the script's directory, or the working directory for a module (not with -P)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory


def _code_of(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    print(exit.code, file=sys.stderr)  # as the interpreter does
    return 1


def _without_our_frames(traceback: Any) -> Any:
    """The traceback from the script's own first frame on."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback
