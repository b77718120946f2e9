"""What nf4_patch replaces and looks up in each library. ``libraries/__init__.py`` fills the tables on import."""

from __future__ import annotations

from dataclasses import dataclass

from .target import Target


@dataclass(frozen=True)
class Library:
    """A library that nf4_patch changes."""

    targets: tuple[Target, ...]


LIBRARIES: list[Library] = []
TARGETS: list[Target] = []  # the targets of all libraries
