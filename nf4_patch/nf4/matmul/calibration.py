"""What ``nf4-patch calibrate`` measured on this machine's GPUs: a file, read at the first question about a GPU.

It takes precedence over the shipped tables, for the sizes and releases that were measured. A file that cannot be used is
named by :func:`status`; nothing here raises because of it. By GPU it holds the date, the releases, ``faster_eagerly`` and,
under "matmul", for each "NxK" rows ``{"m", "config"}`` in ascending m: the config for up to m rows of X, or null where the
original is faster.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .tuning import SmallMConfig

logger = logging.getLogger("nf4_patch")

Rows = Mapping[tuple[int, int], tuple[tuple[int, SmallMConfig | None], ...]]  # by (n, k): up to so many rows of X
Releases = Mapping[str, "str | None"]  # by name; None: not installed


class Entry(NamedTuple):
    """What is in force on one GPU."""

    matmul: Rows = {}  # noqa: RUF012 (never written to)
    faster_eagerly: bool | None = None
    status: str = ""


_path: Path | None = None
_releases: Callable[[], Releases] = dict
_entries: dict[int, Entry] = {}


def use(path: Path | None, releases: Callable[[], Releases]) -> bool:
    """Answer from ``path`` from now on; from nothing if it is None. Nothing is read yet. True: the answers may differ.

    Args:
        releases: what is installed; an entry that names another release of any of them is ignored.
    """
    global _path, _releases
    _releases = releases
    changed = path != _path
    if changed:
        _path = path
        forget()
    return changed


def forget() -> None:
    """Read anew at the next question."""
    _entries.clear()


def gpu(device: int) -> str:
    """The key of a device: name and capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"


def rows(device: int | None) -> Rows:
    """By (n, k) the measured ranges of rows of X; empty where nothing is in force."""
    return {} if device is None else entry(device).matmul


def faster_eagerly(device: int) -> bool | None:
    """Whether an eager dequantization is no slower than the other library's own kernel; None: not measured."""
    return entry(device).faster_eagerly


def status(device: int) -> str:
    """One line: what is in force, or why the file is not; "" where there is nothing about this GPU."""
    return entry(device).status


def entry(device: int) -> Entry:
    found = _entries.get(device)
    if found is None:
        found = _entries[device] = Entry() if _path is None else read(_path, gpu(device), _releases())
        if found.status:
            logger.info("GPU %d: %s", device, found.status)
    return found


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


def read(path: Path, name: str, releases: Releases) -> Entry:
    """The entry of the GPU ``name``."""
    try:
        known = load(path).get(name)
        return Entry() if known is None else parsed(known, releases)
    except OSError as error:
        return Entry(status=f"{path} is ignored: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Entry(status=f"{path} is ignored, it is damaged: {type(error).__name__}: {error}")


def parsed(known: Any, releases: Releases) -> Entry:
    date, then = known["date"], known["releases"]
    for name, release in releases.items():
        if then[name] != release:
            return Entry(
                status=f"the calibration of {date} is ignored: measured with {name} {then[name] or '(none)'}, here is "
                f"{release or 'none'}; `nf4-patch calibrate` measures anew"
            )
    matmul, faster = ranges(known["matmul"]), known["faster_eagerly"]
    if faster not in (True, False, None):
        raise ValueError(f"faster_eagerly is {faster!r}")
    shapes = f"{len(matmul)} shape{'' if len(matmul) == 1 else 's'}"
    return Entry(matmul, faster, f"calibrated on {date}, {shapes}")


def ranges(table: Any) -> Rows:
    """A file's table as Rows."""
    found = {}
    for name, row in table.items():
        n, k = map(int, name.split("x"))
        found[n, k] = tuple((int(one["m"]), config(one["config"])) for one in row)
    return found


def config(values: Any) -> SmallMConfig | None:
    if values is None:
        return None
    made = SmallMConfig(**values)
    if not all(type(value) is bool or (type(value) is int and value > 0) for value in made):
        raise ValueError(f"no {made}")
    return made
