"""Enable the patch, then run somebody's script or module as Python would."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table

import nf4_patch

from ..patching.status import STANDING, Status, TargetStatus, explain
from ..patching.targets import TARGETS
from .report import Report, plural, right_aligned
from .savings import of_the_cache

# Files whose frames stand above the script's own in a traceback.
OUR_FRAMES = (
    __file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)  # fmt: skip


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
        return {**fields, "advice": self.advice(), "exit_code": self.exit_code}

    def advice(self) -> list[str]:
        """What to know and what to do, most important first."""
        lines = []
        if not self.enabled:
            lines.append("The patch was off: NF4_PATCH=0 or NF4_USE_TRITON=0 is set.")
        for target in self.status.targets:
            for name, count in target.fallbacks.items():
                lines.append(f"{target.name}: {count:,} x {explain(name)}")
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
        yield f"nf4_patch: {' '.join(self.command)} (exit {self.code}, {self.seconds:.1f} s)"
        worth_a_line = (*STANDING, "refused")
        shown = [t for t in self.status.targets if t.state in worth_a_line or t.hits or t.fallbacks]
        if shown:
            columns = (*right_aligned("hits", "fallbacks"), Column("target", overflow="fold"))
            table = Table(*columns, box=None, padding=(0, 2, 0, 0))
            for target in shown:
                note = "" if target.state == "patched" else f"\n{target.state}: {target.note}".rstrip(": ")
                table.add_row(f"{target.hits:,}", f"{sum(target.fallbacks.values()):,}", target.name + note)
            yield table
        rest = Counter(
            f"waiting for {waited_for(target)}" if target.state == "waiting" else target.state
            for target in self.status.targets
            if target not in shown
        )
        if rest:
            kinds = ", ".join(f"{count} {kind}" for kind, count in rest.items())
            yield f"{plural(rest.total(), 'more target')}: {kinds}"
        yield f"{plural(self.status.hits, 'dequantization')} in the kernel, {self.status.fallbacks:,} by the original"
        for shape, hits in sorted(self.status.shapes.items(), key=lambda item: -item[1]):
            if hits:
                yield f"  {hits:,} x {shape}"
        yield from of_the_cache(self.status)
        yield from self.advice()


def waited_for(status: TargetStatus) -> str:
    """The library whose import a target waits for, or the one module of an imported library."""
    target = next(target for target in TARGETS if target.name == status.name)
    return target.module if target.distribution in sys.modules else target.distribution


def run(module: str | None, arguments: Sequence[str], shown: bool = False) -> RunReport:
    """Run ``arguments[0]`` as a script, or ``module``, as ``__main__``, with the patch on.

    sys.argv, sys.path[0] and __main__ are what ``python`` would make them, and stay so: threads and atexit handlers of
    the run may outlive it. What the run raises is reported as the interpreter would, on stderr; the report carries the
    exit code. Children are patched through NF4_PATCH=1 in the environment.

    Raises:
        OSError: the script cannot be read.
    """
    start = _module(module) if module else _script(arguments[0])
    enabled = nf4_patch.enable()
    if enabled:
        os.environ["NF4_PATCH"] = "1"
    started = time.perf_counter()
    sys.argv = [module, *arguments] if module else list(arguments)  # runpy puts the module's file in place of its name
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = builtins
    code = _flush(_exit_code(start))
    command = ["-m", module, *arguments] if module else list(arguments)
    seconds, status = time.perf_counter() - started, nf4_patch.status()
    return RunReport(command, enabled, code, seconds, status, shown)


def _module(name: str) -> Callable[[], Any]:
    """What runs a module in the ``__main__`` of sys.modules: the function that ``python -m`` calls."""

    def start() -> None:
        _lead_path_with(os.getcwd())
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]

    return start


def _script(name: str) -> Callable[[], Any]:
    """What runs a script, a .pyc, or a folder or zip file with a __main__.py, in the ``__main__`` of sys.modules.

    Raises:
        OSError: it cannot be read.
    """
    path = os.path.abspath(name)
    if os.path.isdir(path) or zipfile.is_zipfile(path):

        def start() -> None:
            sys.path[0 : 0 if _safe_path() else 1] = [path]
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]

        return start
    loader: Any = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    data = loader.get_data(path)

    def execute() -> None:
        _lead_path_with(os.path.dirname(os.path.realpath(path)))
        main = sys.modules["__main__"].__dict__
        main.update(__file__=path, __cached__=None, __loader__=loader)
        code = loader.get_code("__main__") if path.endswith(".pyc") else loader.source_to_code(data, path)
        exec(code, main)

    return execute


def _exit_code(start: Callable[[], Any]) -> int:
    """That of the run; what it raises is printed as the interpreter would."""
    try:
        start()
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)  # as the interpreter does
        return 1
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 130
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename in OUR_FRAMES:
            traceback = traceback.tb_next  # to the script's own first frame
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 1
    return 0


def _flush(code: int) -> int:
    """The exit code: 120, as the interpreter's, where stdout no longer takes what was printed."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError:  # the run closed it
        pass
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"nf4_patch: stdout: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush would fail too
        return code or 120
    return code


def _lead_path_with(directory: str) -> None:
    """The first entry of sys.path is the script's directory, or the working directory for a module (not with -P)."""
    if not _safe_path():
        sys.path[0] = directory


def _safe_path() -> bool:
    """python -P, which leaves sys.path alone."""
    return getattr(sys.flags, "safe_path", False)
