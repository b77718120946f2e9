"""What nf4_patch replaces and looks up in each library. ``libraries/__init__.py`` fills the tables on import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .target import Target


@dataclass(frozen=True)
class Library:
    """A library that nf4_patch changes or looks into.

    Attributes:
        targets: the functions that are replaced.
        modules: the library's Python modules that the core and the engines look into, by what they find there.
        relays: functions of the library that only return the dequantized weight to their own caller, by their module.
        checkpoint: (module, name) of a checkpoint function that is always reentrant. While it is in use, PyTorch's
            ``CheckpointFunction`` is a class of its module, which keeps a layer's input in host memory.
        folders: names of folders into which the library writes Python modules.
        folder_variable: an environment variable that names one more such folder.
    """

    targets: tuple[Target, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    relays: Mapping[str, str] = field(default_factory=dict)
    checkpoint: tuple[str, str] | None = None
    folders: tuple[str, ...] = ()
    folder_variable: str = ""


LIBRARIES: list[Library] = []
TARGETS: list[Target] = []  # the targets of all libraries
MODULES: dict[str, str] = {}  # the modules of all libraries
