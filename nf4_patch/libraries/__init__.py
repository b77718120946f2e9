"""The libraries that nf4_patch changes, one folder for each.

A folder's ``__init__`` names every function that is replaced in the library, for all options, and what else nf4_patch looks
up there. It imports nothing but the core's tables, because ``import nf4_patch`` reads it before torch is imported. The
other modules of a folder pass the library's arguments to the engines, which are the folders of the options and name no
library.

A library function is replaced by a plain function. A wrapt object would not do, because torch.compile bypasses it or
breaks the graph at it. Each replacement checks at every call whether the patch is on. So ``disable`` also works after
another library has wrapped the replacement.
"""

from __future__ import annotations

from ..patching.targets import LIBRARIES, MODULES, TARGETS
from .accelerate import ACCELERATE
from .bitsandbytes import BITSANDBYTES
from .liger import LIGER
from .peft import PEFT
from .pytorch import PYTORCH
from .transformers import TRANSFORMERS
from .unsloth import UNSLOTH

# The order is that in which ``nf4-patch doctor`` imports the libraries: unsloth_zoo cannot be imported before unsloth.
LIBRARIES[:] = (BITSANDBYTES, UNSLOTH, PEFT, TRANSFORMERS, LIGER, PYTORCH, ACCELERATE)
TARGETS[:] = (target for library in LIBRARIES for target in library.targets)
MODULES.update(module for library in LIBRARIES for module in library.modules.items())
