"""The libraries that nf4_patch changes, one folder for each.

A folder's ``__init__`` lists every function that is replaced in the library, for all options, and what else nf4_patch looks
up there. It is read before torch is imported, so it imports only the core's tables. The other modules of a folder pass the
library's arguments to the engines. The engines are the folders of the options, and name no library.

A library function is replaced by a plain function. A wrapt object would not do, because torch.compile bypasses it or
breaks the graph at it. Each replacement checks at every call whether the patch is on. So ``disable`` also works after
another library has wrapped the replacement.
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
