"""Tables of the library functions that nf4_patch replaces, and of the modules that it reads.

``libraries/__init__.py`` fills these tables on import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .target import Target


@dataclass(frozen=True)
class Library:
    """The parts of one library that nf4_patch replaces or reads.

    Attributes:
        targets: the functions that are replaced.
        modules: names of the library's modules that are read, keyed by their contents, for example "4-bit layers".
        relays: names of functions that only return the dequantized weight to their own caller, keyed by module.
        checkpoint: (module, name) of a checkpoint function that is always reentrant. While it is in use, PyTorch's
            ``CheckpointFunction`` is replaced by a class of that module, which keeps a layer's input in host memory.
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
