"""The libraries that nf4_patch changes, with one folder per library.

A folder's ``__init__`` lists every function that is replaced in the library, for all options, and the modules that
nf4_patch reads. It runs before torch is imported, so it imports only the core's tables. A folder's other modules call
the options' folders, whose code names no library.

A replacement is a plain function, because torch.compile bypasses a wrapt object or breaks the graph at it. It checks at
every call whether the patch is on, so that ``disable`` works even after another library has wrapped it.
"""

from __future__ import annotations

import importlib

from ..patching.targets import LIBRARIES, MODULES, TARGETS

# ``nf4-patch doctor`` imports the libraries in this order, because unsloth_zoo cannot be imported before unsloth.
FOLDERS = [
    "bitsandbytes",
    "unsloth",
    "peft",
    "transformers",
    "liger",
    "pytorch",
    "accelerate",
]

LIBRARIES[:] = (importlib.import_module(f".{folder}", __name__).LIBRARY for folder in FOLDERS)
TARGETS[:] = (target for library in LIBRARIES for target in library.targets)
MODULES.update(module for library in LIBRARIES for module in library.modules.items())
