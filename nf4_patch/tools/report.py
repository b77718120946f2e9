"""Code that the commands share: the type of their reports, the display of progress, and an error for impossible tasks."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nf4_patch

from ..patching.config import Config
from ..patching.reasons import Reason
from ..version import release_of

Progress = Callable[..., None]  # a command calls it to show its progress; ``silent`` lists the arguments


def silent(text: str, done: int = 0, total: int | None = None) -> None:
    """A ``Progress`` that shows nothing."""


class Report(ABC):
    """The result of a command, as data (for --json), as text and as an exit code.

    In JSON, a value that ``json`` cannot write becomes its ``str``.
    """

    failures: Sequence[str] = ()

    def problems(self) -> list[str]:
        """Return a sentence for every problem that was found."""
        return [*self.failures]

    @property
    def exit_code(self) -> int:
        return 1 if self.problems() else 0

    @abstractmethod
    def render(self) -> Iterable[str]:
        """Yield sentences, or tables of several lines, to print."""

    def as_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {**fields, "problems": self.problems(), "exit_code": self.exit_code}


class NotAvailable(RuntimeError):
    """A command cannot do its task on this machine. The message says why."""


def why_no_gpu() -> str:
    """Return why torch finds no NVIDIA GPU, or ""."""
    import torch

    if torch.version.hip is not None:
        return Reason.ROCM.sentence
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (for an NVIDIA GPU, install a build with CUDA from pytorch.org)"
    if torch.cuda.is_available():
        return ""
    return f"torch finds no NVIDIA GPU (if nvidia-smi lists one, its driver might be too old for CUDA {torch.version.cuda})"


def require_gpu() -> None:
    if why := why_no_gpu():
        raise NotAvailable(f"{why}, so nothing can be measured or compared on this machine")


def require_patch() -> None:
    if off := Config.read().forbidden:
        raise NotAvailable(f"{off} keeps the patch off. Unset it to measure the patch")


DISTRIBUTIONS = (
    "torch", "triton", "bitsandbytes", "unsloth", "unsloth_zoo", "transformers", "peft", "trl", "liger_kernel", "wrapt",
)  # fmt: skip


def installed_releases(names: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    return {name: release for name in names if (release := release_of(name)) is not None}


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return a text table. The first column is left-aligned, all others right-aligned."""
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
    """Return a count with its noun: "1 case", "2,000 cases"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def provenance(place: str) -> str:
    """Return the line printed with every result."""
    return ", ".join([place, *(f"{name} {release}" for name, release in installed_releases().items())])


def provenance_data() -> dict[str, Any]:
    return {"releases": installed_releases(), "date": datetime.date.today().isoformat(), "commit": commit()}


def commit() -> str | None:
    """Return the commit of the package's checkout, or None without git."""
    folder = str(Path(nf4_patch.__file__).parent)
    if not answer("git", "-C", folder, "ls-files", "__init__.py"):
        return None
    return answer("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or None


def answer(*command: str) -> str:
    """Run a command and return its output, or "" if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def driver() -> str:
    """Return the driver's release, or ""."""
    return answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def issues() -> str:
    """Return the address of the project's issues, or a phrase while pyproject.toml has none."""
    urls: list[str] = []
    if release_of("nf4-patch"):
        urls = importlib.metadata.metadata("nf4-patch").get_all("Project-URL") or []
    return next((url.partition(", ")[2] for url in urls if url.startswith("Issues, ")), "an issue of this project")
