"""Keep the decisions of a non-reentrant checkpoint's forward, so that its recompute repeats them.

A decision says whether peft's forward or our function runs. The two save different tensors, but a checkpoint requires the same
tensors from forward and recompute. A second decision could differ from the first, for example if FlopCounterMode or a hook is
active during the forward only.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from ..patching.reasons import Reason

Decision = Reason | bool  # the Reason why peft's forward ran, or True if our function ran
NAME = "nf4_patch_lora"


def decisions_of(pack: Any) -> tuple[list[Decision], Decision | None] | None:
    """Return the list of decisions, and the forward's decision about this call.

    The caller appends its own decision to the list. The list is in the order of calls, and is freed with the checkpoint's frame,
    which holds it.

    Args:
        pack: the current pack hook for saved tensors.

    Returns:
        The list, and the decision of the forward. Outside of a recompute, this decision is None. If the hook does not belong to a
        checkpoint, the result is None.
    """
    function = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(function, "__globals__", None) is not vars(checkpoint):
        return None
    for cell in function.__closure__ or ():
        found = cell.cell_contents
        if type(found) is checkpoint._CheckpointFrame:  # the forward
            return vars(found).setdefault(NAME, []), None
        # In a recompute, the hook holds a weak reference to the frame. Every recompute has a new hook.
        if type(found) is weakref.ref:
            earlier = vars(pack).setdefault(NAME, iter(getattr(found(), NAME, ())))
            return [], next(earlier, None)
    return None
