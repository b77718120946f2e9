"""What ``nf4-patch calibrate`` measured on this machine's GPUs: a file, read at the first question about a GPU.

Its rows go before nf4's tables, for the sizes and releases that were measured. A file that cannot be used is named by
:func:`in_force`; nothing here raises because of it. By GPU it holds the date, the releases and, under "matmul", for each
"NxK" rows ``{"m", "config"}`` in ascending m: the config for up to m rows of X, or null where the original is faster.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..nf4 import runtime
from ..patching.config import Config
from ..patching.switch import switch
from ..version import __version__, release_of
from .option import MATMUL
from .tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS, CalibratedRanges, SmallMConfig

logger = logging.getLogger("nf4_patch")


class InForce(NamedTuple):
    """What is in force on one GPU."""

    rows: Mapping[tuple[int, int], CalibratedRanges] = {}  # by [n, k]; noqa: RUF012 (never written to)
    status: str = ""  # in one line: what it is, or why the file's is not; "" where there is nothing about this GPU


on_change: list[Callable[[], None]] = []  # called when what was decided by the rows has to be decided again
_path: Path | None = None
_in_force: dict[int, InForce] = {}


def use(config: Config) -> None:
    """Let the file that NF4_PATCH_CALIBRATION names decide, where it has this GPU and these releases. Nothing is read yet."""
    global _path
    if config.calibration != _path:
        _path = config.calibration
        forget()


def forget() -> None:
    """Read the file again at the next question, and decide again what was decided by it."""
    _in_force.clear()
    for call in on_change:
        call()


def in_force(device: int) -> InForce:
    """Of the GPU with this index; read at the first question."""
    found = _in_force.get(device)
    if found is None:
        found = _in_force[device] = InForce() if _path is None else read(_path, gpu(device))
        if found.status:
            logger.info("nf4_patch: GPU %d: %s", device, found.status)
    return found


def gpu(device: int) -> str:
    """The key of a device: name and capability."""
    major, minor = runtime.capability_of(device)
    return f"{runtime.name_of(device)}, sm_{major}{minor}"


def releases() -> dict[str, str | None]:
    """The releases that a calibration depends on; None: not installed."""
    triton = runtime.triton.__version__ if runtime.triton else None
    libraries = dict.fromkeys(target.library for target in MATMUL.targets)
    return {"nf4_patch": __version__, "triton": triton, **{name: release_of(name) for name in libraries}}


def load(path: Path) -> dict[str, Any]:
    """The file's entries by GPU, unread; empty where there is no file.

    Raises:
        OSError, ValueError: it cannot be read, or is not what was written.
    """
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(known, dict):
        raise ValueError(f"a {type(known).__name__}, not an object")
    return known


def write(path: Path, entries: dict[str, Any]) -> None:
    """Whoever reads sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    forget()


def read(path: Path, name: str) -> InForce:
    """The file's entry of the GPU ``name``, if it is of these releases."""
    try:
        known = load(path).get(name)
        return InForce() if known is None else parsed(known)
    except OSError as error:
        return InForce(status=f"{path} is ignored: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return InForce(status=f"{path} is ignored, it is damaged: {type(error).__name__}: {error}")


def parsed(known: Any) -> InForce:
    date, then = known["date"], known["releases"]
    for name, release in releases().items():
        if then[name] != release:
            return InForce(
                status=f"the calibration of {date} is ignored: measured with {name} {then[name] or '(none)'}, here is "
                f"{release or 'none'}; `nf4-patch calibrate` measures again"
            )
    found = {}
    for shape, ranges in known["matmul"].items():
        n, k = map(int, shape.split("x"))
        found[n, k] = tuple((one["m"], config_of(one["config"])) for one in ranges)
        rows = [m for m, _ in found[n, k]]
        if not all(type(m) is int for m in rows) or rows != sorted(set(rows)):
            raise ValueError(f"{shape} has the rows {rows}")
    return InForce(found, f"calibrated on {date}, {len(found)} shape{'' if len(found) == 1 else 's'}")


def config_of(values: Any) -> SmallMConfig | None:
    if values is None:
        return None
    made = SmallMConfig(**values)
    for row in SMALL_M_ROWS + SMALL_M_CANDIDATES:  # what the same release measures
        if row.config == made:
            return row.config
    raise ValueError(f"no {made}")


switch.follow(lambda config: None if config is None else use(config))
