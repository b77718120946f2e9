"""The files that a command writes: checked before the work, written after it, when nothing may raise any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


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


def write(file: Path, writer: Callable[[Path], Any]) -> bool:
    """Let ``writer`` write ``file``. A failure is one line on stderr, and False: the result of the work is kept."""
    try:
        writer(file)
    except OSError as error:
        print(f"nf4_patch: {file} was not written: {error.strerror or error}", file=sys.stderr)
        return False
    return True


def flushed(code: int) -> int:
    """The exit code: 120, as the interpreter's, where stdout no longer takes what was printed."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError:  # closed
        pass
    except OSError as error:
        ending = lost(error)
        return code or ending
    return code


def lost(error: OSError) -> int:
    """The exit code where stdout raised; the reason is one line on stderr, nothing where the reader has gone."""
    if not isinstance(error, BrokenPipeError):
        print(f"nf4_patch: stdout: {error.strerror}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush would fail too
    return 120


class OutputFile(click.ParamType):
    """A click option whose value is a checked, absolute Path."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            return checked(value)
        except OutputError as error:
            self.fail(str(error), parameter, ctx)
