"""Decisions of the forward of a non-reentrant checkpoint, kept for its recompute.

peft's forward and our function save different tensors, but a checkpoint requires the same tensors from forward and recompute.
A second decision could differ from the first, for example if FlopCounterMode or a hook is active during the forward only.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from ..patching.reasons import Reason

Decision = Reason | bool  # the Reason why peft's forward ran, or True if our function ran
NAME = "nf4_patch_lora"


def decisions_of(pack: Any) -> tuple[list[Decision], Decision | None] | None:
    """Return the list to append this call's decision to and, in a recompute, the forward's decision about the same call.

    The checkpoint's frame holds the list, in the order of calls, and frees it.

    Args:
        pack: the current pack hook for saved tensors.

    Returns:
        None if the hook does not belong to a checkpoint. The decision is None outside of a recompute.
    """
    function = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(function, "__globals__", None) is not vars(checkpoint):
        return None
    for cell in function.__closure__ or ():
        found = cell.cell_contents
        if type(found) is checkpoint._CheckpointFrame:  # the forward
            return vars(found).setdefault(NAME, []), None
        if type(found) is weakref.ref:  # to the frame, in a recompute; every recompute has a new hook
            earlier = vars(pack).setdefault(NAME, iter(getattr(found(), NAME, ())))
            return [], next(earlier, None)
    return None
