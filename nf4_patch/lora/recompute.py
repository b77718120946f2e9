"""Record the decisions in the forward of a non-reentrant checkpoint, so that the recompute repeats them.

A decision says whether peft's forward or our function runs a layer. The two save different tensors for the backward,
but a checkpoint requires that its recompute saves the same tensors as its forward. Without a record, the recompute
could decide differently than the forward, for example if FlopCounterMode or a hook is active during the forward only.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from ..patching.reasons import Reason

Decision = Reason | bool  # the Reason why peft's forward ran, or True if our function ran
NAME = "nf4_patch_lora"


def decisions_of(pack: Any) -> tuple[list[Decision], Decision | None] | None:
    """Return the list to which the caller appends its decision, and the decision of the forward about the same call.

    In a forward, the list contains the decisions in the order of the calls. The checkpoint's frame holds this list, so
    the list is freed with the frame.

    Args:
        pack: the current pack hook for saved tensors.

    Returns:
        The list and the forward's decision, which is None outside of a recompute. If ``pack`` does not belong to a
            checkpoint, the whole result is None.
    """
    function = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(function, "__globals__", None) is not vars(checkpoint):
        return None
    for cell in function.__closure__ or ():
        found = cell.cell_contents
        if type(found) is checkpoint._CheckpointFrame:  # the forward
            return vars(found).setdefault(NAME, []), None
        # The hook of a recompute holds a weak reference to the frame. Every recompute has a new hook.
        if type(found) is weakref.ref:
            earlier = vars(pack).setdefault(NAME, iter(getattr(found(), NAME, ())))
            return [], next(earlier, None)
    return None
