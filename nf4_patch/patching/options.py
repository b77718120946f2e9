"""The table of options: the one place of the core that knows them."""

from __future__ import annotations

from ..graphs.option import GRAPHS
from ..graphs.option import GraphsStatus as GraphsStatus
from .cache.option import CACHE
from .cache.option import CacheStatus as CacheStatus
from .experts.option import EXPERTS, OFFLOAD
from .experts.option import OffloadStatus as OffloadStatus
from .lora.option import LORA
from .matmul.option import MATMUL

OPTIONS = {option.argument: option for option in (MATMUL, CACHE, EXPERTS, LORA, OFFLOAD, GRAPHS)}
