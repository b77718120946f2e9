"""What every verb returns, how it reports progress, and what it raises."""

from __future__ import annotations

import dataclasses
import datetime
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nf4_patch

from ..patching.config import Config
from ..version import release_of

Progress = Callable[..., None]  # called with what is being done, and how far it is: see ``silent``


def silent(text: str, done: int = 0, total: int | None = None) -> None:
    """A Progress that shows nothing. ``total`` None: unknown."""


class Report(ABC):
    """The result of a verb, as data (``as_dict``, for --json), as text and as an exit code.

    Subclasses are dataclasses whose fields ``json`` can write, or whose ``str`` says what they are.
    """

    failures: Sequence[str] = ()

    def problems(self) -> list[str]:
        """What speaks against what the verb asserts, each in a sentence."""
        return [*self.failures]

    @property
    def exit_code(self) -> int:
        """0 where what the verb asserts holds, 1 where it does not."""
        return 1 if self.problems() else 0

    @abstractmethod
    def render(self) -> Iterable[str]:
        """What a person reads, top to bottom: sentences, and tables of several lines."""

    def as_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {**fields, "problems": self.problems(), "exit_code": self.exit_code}


class NotAvailable(RuntimeError):
    """What a verb is asked cannot be done here; the message says why."""


def require_gpu() -> None:
    """
    Raises:
        NotAvailable: torch finds no NVIDIA GPU.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise NotAvailable("no NVIDIA GPU: nothing can be measured or compared here")


def require_patch() -> None:
    """
    Raises:
        NotAvailable: a variable keeps the patch off, so that it cannot be measured.
    """
    if off := Config.read().forbidden:
        raise NotAvailable(f"{off} keeps the patch off: unset it to measure the patch")


DISTRIBUTIONS = (
    "torch", "triton", "bitsandbytes", "unsloth", "unsloth_zoo", "transformers", "peft", "trl", "liger_kernel", "wrapt",
)  # fmt: skip


def installed_releases(names: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    """The installed releases, by distribution. One that is not installed is left out."""
    return {name: release for name in names if (release := release_of(name)) is not None}


def holds(release: str, condition: str) -> bool:
    """Whether a release meets a condition, ">= 0.50" or "<= 2026.9.12"; "": every release does."""
    if not condition:
        return True
    relation, bound = condition.split()
    a, b = (tuple(int(digits) for digits in re.findall(r"\d+", text)[:3]) for text in (release, bound))
    return a >= b if relation == ">=" else a <= b


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """A line a row under the names of its columns, the first to the left, the others to the right."""
    rows = list(rows)
    columns: list[list[str]] = []
    for name in dict.fromkeys(name for row in rows for name in row):
        texts = [name, *(cell(row.get(name)) for row in rows)]
        width = max(map(len, texts))
        columns.append([text.rjust(width) if columns else text.ljust(width) for text in texts])
    return "\n".join(map("  ".join, zip(*columns, strict=True)))


def cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def plural(count: int, noun: str) -> str:
    """ "1 case", "2,000 cases"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def provenance(place: str) -> str:
    """One line that goes with every figure: where, and with which releases."""
    return ", ".join([place, *(f"{name} {release}" for name, release in installed_releases().items())])


def provenance_data() -> dict[str, Any]:
    """What goes with every JSON file: with which releases it was made, and when."""
    return {"releases": installed_releases(), "date": datetime.date.today().isoformat(), "commit": commit()}


def commit() -> str | None:
    """The commit of the checkout that the package runs from; None where git does not know the package's files."""
    folder = str(Path(nf4_patch.__file__).parent)
    if not answer("git", "-C", folder, "ls-files", "__init__.py"):
        return None
    return answer("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or None


def answer(*command: str) -> str:
    """What a command prints; "" where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
