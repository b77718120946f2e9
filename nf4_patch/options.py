"""Fill the table of options while the package is imported. The core reads the table and does not import the options."""

from __future__ import annotations

from .cache.option import CACHE
from .cache.option import CacheStatus as CacheStatus
from .graphs.option import GRAPHS
from .graphs.option import GraphsStatus as GraphsStatus
from .lora.option import LORA
from .matmul.option import MATMUL
from .moe.option import EXPERTS
from .offload.option import OFFLOAD
from .offload.option import OffloadStatus as OffloadStatus
from .patching.option import OPTIONS

OPTIONS.update({option.argument: option for option in (MATMUL, CACHE, EXPERTS, LORA, OFFLOAD, GRAPHS)})
