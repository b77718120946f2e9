"""The files that a command writes: checked before the work, written after it, when nothing may raise any more."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click


def absolute(path: str | Path) -> Path:
    """As seen from the working directory of this moment: the work may change it."""
    return Path(os.path.abspath(os.path.expanduser(path)))  # not resolved: /dev/stdout leads to a pipe


class OutputFile(click.Path):
    """A file that can be written, as an absolute path. Click alone takes a file in a folder that does not exist."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, readable=False)

    def convert(self, value: Any, param: click.Parameter | None = None, ctx: click.Context | None = None) -> Path:
        """
        Raises:
            click.BadParameter: the file is a folder, or it or its folder cannot be written.
        """
        file = absolute(value)
        super().convert(str(file), param, ctx)
        if not file.exists():
            click.Path(exists=True, file_okay=False, writable=True, readable=False).convert(
                str(file.parent), param, ctx
            )
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
