"""The calibration file of ``nf4-patch calibrate``, read at the first query for a GPU.

A calibration takes precedence over the tables in tuning.py, for the sizes and releases that were measured. A file that cannot
be used raises no error; the status of :func:`in_force` says why it is ignored. For each GPU, the file has the date, the
releases and, under "matmul", a list per "NxK" of ``{"m", "config"}`` in ascending m. A config applies to up to m rows of X,
and is null if the original is faster.
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
    """The calibration in force on one GPU."""

    rows: Mapping[tuple[int, int], CalibratedRanges] = {}  # by [n, k]; noqa: RUF012 (never written to)
    status: str = ""  # one line: the calibration's date, or why it is ignored; "" if the file has none for this GPU


on_change: list[Callable[[], None]] = []  # called when the rows change, to drop decisions that were based on them
_path: Path | None = None
_in_force: dict[int, InForce] = {}


def use(config: Config) -> None:
    """Use the file that NF4_PATCH_CALIBRATION names, without reading it yet."""
    global _path
    if config.calibration != _path:
        _path = config.calibration
        forget()


def forget() -> None:
    """Read the file again at the next query, and drop all decisions that were based on it."""
    _in_force.clear()
    for call in on_change:
        call()


def in_force(device: int) -> InForce:
    """Return the calibration in force on the GPU with this index. Read the file at the first query."""
    found = _in_force.get(device)
    if found is None:
        found = _in_force[device] = InForce() if _path is None else read(_path, gpu(device))
        if found.status:
            logger.info("nf4_patch: GPU %d: %s", device, found.status)
    return found


def gpu(device: int) -> str:
    """Return a GPU's key in the file: its name and capability."""
    major, minor = runtime.capability_of(device)
    return f"{runtime.name_of(device)}, sm_{major}{minor}"


def releases() -> dict[str, str | None]:
    """Return the releases that a calibration depends on, None for a library that is not installed."""
    triton = runtime.triton.__version__ if runtime.triton else None
    libraries = dict.fromkeys(target.library for target in MATMUL.targets)
    return {"nf4_patch": __version__, "triton": triton, **{name: release_of(name) for name in libraries}}


def load(path: Path) -> dict[str, Any]:
    """Return the file's entries by GPU, not validated; empty if the file does not exist.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(known, dict):
        raise ValueError(f"it holds a {type(known).__name__}, not an object")
    return known


def write(path: Path, entries: dict[str, Any]) -> None:
    """Replace the file atomically, so that readers see either the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    forget()


def read(path: Path, name: str) -> InForce:
    """Return the file's calibration of the GPU ``name``, if the installed releases match."""
    try:
        known = load(path).get(name)
        return InForce() if known is None else parsed(known)
    except OSError as error:
        return InForce(status=f"{path} is ignored: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return InForce(status=f"{path} is ignored because it is damaged: {type(error).__name__}: {error}")


def parsed(known: Any) -> InForce:
    date, then = known["date"], known["releases"]
    for name, release in releases().items():
        if then[name] != release:
            return InForce(
                status=f"the calibration of {date} is ignored: it was measured with {name} {then[name] or '(none)'}, but "
                f"{release or 'none'} is installed; run `nf4-patch calibrate` again"
            )
    found = {}
    for shape, ranges in known["matmul"].items():
        n, k = map(int, shape.split("x"))
        found[n, k] = tuple((one["m"], config_of(one["config"])) for one in ranges)
        rows = [m for m, _ in found[n, k]]
        if not all(type(m) is int for m in rows) or rows != sorted(set(rows)):
            raise ValueError(f"{shape} has rows that do not ascend: {rows}")
    return InForce(found, f"calibrated on {date}, {len(found)} shape{'' if len(found) == 1 else 's'}")


def config_of(values: Any) -> SmallMConfig | None:
    if values is None:
        return None
    made = SmallMConfig(**values)
    for row in SMALL_M_ROWS + SMALL_M_CANDIDATES:  # the candidates of ``nf4-patch calibrate``
        if row.config == made:
            return row.config
    raise ValueError(f"{made} is not a candidate")


switch.follow(lambda config: None if config is None else use(config))
