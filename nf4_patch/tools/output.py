"""The files that a command writes: checked before the work, written after it, when nothing may raise any more."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any


class OutputError(ValueError):
    """No file can be written at this path; the message says why."""


def absolute(path: str | Path) -> Path:
    """As seen from the working directory of this moment: the work may change it."""
    return Path(os.path.abspath(os.path.expanduser(path)))  # not resolved: /dev/stdout leads to a pipe


def checked(path: str | Path) -> Path:
    """The absolute path of a file that can be written.

    Raises:
        OutputError: the folder is missing or is not one, or the file or folder cannot be written.
    """
    file = absolute(path)
    if file.is_dir():
        raise OutputError(f"{file} is a folder; name a file in it")
    if not file.exists() and not file.parent.is_dir():
        raise OutputError(f"{file} cannot be written: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OutputError(f"{file} cannot be written: no permission, or a read-only file system")
    return file


def write_json(file: Path, data: dict[str, Any]) -> None:
    """A failure is one line on stderr: the result of the work is kept."""
    try:
        file.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"nf4_patch: {file} was not written: {error.strerror}")


def say(*lines: object, end: str = "\n") -> None:
    """On stderr, if there is one and it takes them: ``print`` would take stdout where it is closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(*lines, sep="\n", end=end, file=sys.stderr, flush=True)
