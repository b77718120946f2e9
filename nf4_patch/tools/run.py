"""Run a command whose Python processes are patched as they start, and report what became of their 4-bit weights."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import math
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import nf4_patch  # NF4_PATCH=1 switches it on

from ..config import Config, is_worker, rank
from ..patching.status import Status
from ..patching.targets import TARGETS

STARTUP = os.path.join(os.path.dirname(__file__), "startup")  # Python runs its sitecustomize.py
REPORT = "_NF4_PATCH_REPORT"  # carries the arguments of ``report`` to the processes
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # per element


def execute(command: list[str], shown: bool, file: Path | None, all_ranks: bool) -> NoReturn:
    """Replace this process by ``command``: a program, or a script, ``-m MODULE`` or ``-c CODE`` for this Python.

    Args:
        shown, file, all_ranks: see ``report``.

    Raises:
        OSError: there is no such script or program.
    """
    if command[0].endswith(".py"):
        os.stat(command[0])
    if command[0].endswith(".py") or command[0] in ("-m", "-c"):
        command = [sys.executable, *command]
    if not Config.read().forbidden:
        os.environ["NF4_PATCH"] = "1"
    if shown or file:
        os.environ[REPORT] = json.dumps([shown, file and str(file), all_ranks, f"{os.getpid()}-{time.time_ns()}"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STARTUP, os.environ.get("PYTHONPATH"))))
    os.execvp(command[0], command)


def watch() -> None:
    """Report at the end of this process, if it imports bitsandbytes: called as Python starts."""
    if REPORT not in os.environ:
        return
    import wrapt

    arguments = json.loads(os.environ[REPORT])

    def bitsandbytes_is_imported(bitsandbytes: ModuleType) -> None:
        atexit.register(report, os.getpid(), *arguments)

    wrapt.register_post_import_hook(bitsandbytes_is_imported, "bitsandbytes")


def report(process: int, shown: bool, file: str | None, all_ranks: bool, run: str = "") -> None:
    """Say at the end of a process what ran in the kernel and what did not. Workers and forks say nothing.

    Args:
        process: the id of the process that is to report.
        shown: on stderr.
        file: written there as JSON, see ``add``; with ``all_ranks`` a file per rank, ``report.rank1.json``.
        all_ranks: every process of a launcher reports, not only rank 0.
        run: by which the reports of one command are known.
    """
    if os.getpid() != process or is_worker() or not (all_ranks or rank() in ("", "0")):
        return
    from . import output
    from .report import provenance_data

    status = nf4_patch.status()
    command, advice = " ".join(sys.orig_argv), [*of_the_cache(status), *of_own_kernels()]
    if shown:
        heading = f"nf4_patch{rank() and f', rank {rank()}'}: {command}"
        output.say(heading, status, *advice)
    if file:
        path = Path(file)
        data = {"command": command, "rank": rank(), "status": status.as_dict(), "advice": advice, **provenance_data()}
        add(path.with_suffix(f".rank{rank()}{path.suffix}") if all_ranks and rank() else path, data | {"run": run})


def add(file: Path, data: dict[str, Any]) -> None:
    """Write a report with an empty list ``others``, or add it to that list of another process of the same run.

    A device or a pipe gets one report after another.
    """
    from . import output

    if (file.exists() and not file.is_file()) or file.is_relative_to("/dev"):
        output.write_json(file, data)
        return
    with contextlib.ExitStack() as stack:
        first = data | {"others": []}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not to be read, or no such report
            opened = stack.enter_context(file.open("a+", encoding="utf-8"))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(opened, fcntl.LOCK_EX)  # processes may end at the same time
            opened.seek(0)
            known = json.load(opened)
            if known["run"] == data["run"]:
                known["others"].append(data)
                first = known
        output.write_json(file, first)


def of_own_kernels() -> list[str]:
    """Which calls stay with a library's own kernel, if it is used."""
    return [t.own_kernel.advice for t in TARGETS if t.own_kernel and t.own_kernel.in_use(t.module)]


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
    return [
        f"cache: the {weights} weights take {size / 2**30:.2f} GiB dequantized. A cache of that size would have saved "
        f"{saved:.0%} of the dequantizations, one of half that size at least {saved / 2:.0%}; "
        'enable(cache="auto") finds a size.'
    ]
