"""Record the decisions in the forward of a non-reentrant checkpoint, so that the recompute repeats them.

Otherwise, a hook or FlopCounterMode that is active only during the forward would change the decision.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from ..patching.reasons import Reason

Decision = Reason | bool  # the Reason why peft's forward ran, or True if nf4_patch's function ran
NAME = "nf4_patch_lora"


def decisions_of(pack: Any) -> tuple[list[Decision], Decision | None] | None:
    """Return a list, to which the caller appends its Decision, and the Decision that the caller has to repeat.

    The second value is the forward's Decision for the same call, or None in a forward. Return None instead of the pair if
    ``pack``, the current pack hook, belongs to no checkpoint.
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
