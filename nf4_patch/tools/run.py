"""``nf4-patch run``: run a command, turn the patch on in all its Python processes, and report hits and fallbacks."""

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

import nf4_patch  # with NF4_PATCH=1, this import turns the patch on

from ..libraries import unsloth
from ..patching.config import Config, is_worker, rank
from ..patching.option import FAST
from ..snapshot import Status

STARTUP = os.path.join(os.path.dirname(__file__), "startup")  # Python runs sitecustomize.py in this folder at its start
REPORT = "_NF4_PATCH_REPORT"  # environment variable that passes the arguments of ``report`` to the command's processes
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}  # per element


def execute(command: list[str], fast: bool, shown: bool, file: Path | None, all_ranks: bool) -> NoReturn:
    """Replace this process by ``command``: a script (.py), ``-m MODULE``, ``-c CODE``, or a program.

    Raises:
        OSError: the script or program does not exist.
    """
    if command[0].endswith(".py"):
        os.stat(command[0])
    if command[0].endswith(".py") or command[0] in ("-m", "-c"):
        command = [sys.executable, *command]
    config = Config.read()
    if not config.forbidden:
        os.environ["NF4_PATCH"] = FAST if fast or config.profile else "1"
    if shown or file:
        os.environ[REPORT] = json.dumps([shown, file and str(file), all_ranks, f"{os.getpid()}-{time.time_ns()}"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STARTUP, os.environ.get("PYTHONPATH"))))
    os.execvp(command[0], command)


def watch() -> None:
    """Register ``report`` for the end of this process, once it imports bitsandbytes. startup/sitecustomize.py calls this."""
    if REPORT not in os.environ:
        return
    import wrapt

    arguments = json.loads(os.environ[REPORT])

    def bitsandbytes_is_imported(bitsandbytes: ModuleType) -> None:
        atexit.register(report, os.getpid(), *arguments)

    wrapt.register_post_import_hook(bitsandbytes_is_imported, "bitsandbytes")


def report(process: int, shown: bool, file: str | None, all_ranks: bool, run: str = "") -> None:
    """Report hits and fallbacks at the end of a process, but not of a data-loader worker or a fork.

    ``process`` is the id of the process that registered the report, which a fork does not have. With ``all_ranks``,
    every process of a launcher reports, not only rank 0, and each writes its own file, such as ``report.rank1.json``.
    ``run`` identifies the command in all of its processes.
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
    """Write ``data`` to ``file``, or append it to the list ``others`` of an earlier report of this run.

    To a device or a pipe, all reports are written one after another.
    """
    from . import output

    if (file.exists() and not file.is_file()) or file.is_relative_to("/dev"):
        output.write_json(file, data)
        return
    with contextlib.ExitStack() as stack:
        first = data | {"others": []}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # unreadable, or not a report
            opened = stack.enter_context(file.open("a+", encoding="utf-8"))
            with contextlib.suppress(OSError):  # raised by a file system without locks
                fcntl.flock(opened, fcntl.LOCK_EX)  # processes may end at the same time
            opened.seek(0)
            known = json.load(opened)
            if known["run"] == data["run"]:
                known["others"].append(data)
                first = known
        output.write_json(file, first)


def of_own_kernels() -> list[str]:
    """Return advice if Unsloth's layers run Unsloth's own kernel."""
    if unsloth.MODULE not in sys.modules:
        return []
    from ..libraries.unsloth.adapters import OWN_KERNEL_ADVICE, uses_own_kernel  # imports torch, as Unsloth did

    return [OWN_KERNEL_ADVICE] if uses_own_kernel() else []


def of_the_cache(status: Status) -> list[str]:
    """Return a sentence that says how many dequantizations a cache of all weights would have saved, if the run had no cache.

    Half the size saves half as many, because weights that are read first stay cached.
    """
    if status.cache.mode != "off" or not any(each.weights for each in status.shapes):
        return []
    from ..cache.allocator import allocated  # imports torch, which the run has imported already

    read = [each for each in status.shapes if each.weights]
    weights, reads = sum(each.weights for each in read), sum(each.hits for each in read)
    size = sum(each.weights * allocated(math.prod(each.shape) * BYTES[each.dtype]) for each in read)
    saved = 1 - weights / max(reads, 1)
    if saved <= 0:
        return []
    return [
        f"cache: the {weights} weights take {size / 2**30:.2f} GiB dequantized. A cache of that size would have saved "
        f"{saved:.0%} of the dequantizations, and a cache of half that size at least {saved / 2:.0%}. "
        'enable(cache="auto") chooses a size.'
    ]
