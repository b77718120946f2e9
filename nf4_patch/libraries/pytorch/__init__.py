"""Everything that nf4_patch replaces in PyTorch."""

from __future__ import annotations

import functools

from ...patching.target import ANY, Target
from ...patching.targets import Library
from ..bitsandbytes import FUNCTIONS

TESTED = ("2.11.0", "2.13.0")

CacheTarget = functools.partial(
    Target, option="cache", uncounted="its reads may come from the cache",
    after=FUNCTIONS,  # when this module is imported, the import of torch is complete
)  # fmt: skip

LIBRARY = Library(
    targets=(
        Target(
            "torch.utils:weakref.getweakrefs", ">= 2.3", TESTED,
            ANY, ".libraries.pytorch.swap:getweakrefs",
            "swaps of tensors to which nf4_patch has weak references", uncounted="swaps are not counted",
            after=FUNCTIONS,  # when this module is imported, the import of torch is complete
        ),
        CacheTarget(
            "torch:UntypedStorage.resize_", ">= 2.0", TESTED,
            ANY, ".cache.replacements:resize",
            "storages that FSDP frees and refills while their weights are cached, with enable(cache=...) only",
        ),
    ),
)  # fmt: skip
