"""Fill the table ``OPTIONS`` when the package is imported, so that the core need not import any option."""

from __future__ import annotations

from .activations.option import ACTIVATIONS
from .activations.option import ActivationsStatus as ActivationsStatus
from .cache.option import CACHE
from .cache.option import CacheStatus as CacheStatus
from .graphs.option import GRAPHS
from .graphs.option import GraphsStatus as GraphsStatus
from .lora.option import LORA
from .matmul.option import MATMUL
from .matmul.option import MatmulStatus as MatmulStatus
from .merge.option import MERGE
from .moe.option import EXPERTS
from .offload.option import OFFLOAD
from .offload.option import OffloadStatus as OffloadStatus
from .patching.option import OPTIONS

OPTIONS.update(
    {option.argument: option for option in (MATMUL, CACHE, EXPERTS, LORA, OFFLOAD, GRAPHS, ACTIVATIONS, MERGE)}
)
