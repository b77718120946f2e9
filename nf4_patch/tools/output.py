"""Write the output files of commands. Check their paths before the work starts, so that no work is lost."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click


def absolute(path: str | Path) -> Path:
    # The working directory might change. Path.resolve() would follow links, such as the link of /dev/stdout to a pipe.
    return Path(os.path.abspath(os.path.expanduser(path)))


class OutputFile(click.Path):
    """The path of a writable file. Unlike click.Path, it rejects a missing folder."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, readable=False)

    def convert(self, value: Any, param: click.Parameter | None = None, ctx: click.Context | None = None) -> Path:
        file = absolute(value)
        super().convert(str(file), param, ctx)
        if not file.exists():
            click.Path(exists=True, file_okay=False, writable=True, readable=False).convert(
                str(file.parent), param, ctx
            )
        return file


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Write ``data`` as JSON. A failure prints one line instead of raising, so that the run still reports its results."""
    try:
        file.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"nf4_patch: {file} could not be written: {error.strerror}")


def say(*lines: object, end: str = "\n") -> None:
    """Print to stderr, and ignore errors."""
    if sys.stderr is not None:  # print(file=None) would print to stdout
        with contextlib.suppress(OSError, ValueError):
            print(*lines, sep="\n", end=end, file=sys.stderr, flush=True)
