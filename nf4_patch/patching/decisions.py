"""Record the decisions in the forward of a non-reentrant checkpoint, so that the recompute repeats them.

Otherwise, a hook or FlopCounterMode that is active only during the forward would change the decision.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from .context import saved_tensors_hooks
from .reasons import Reason

Decision = Reason | bool  # the Reason why the original or PyTorch's operators ran, or True if nf4_patch's code ran


def decisions_of(option: str) -> tuple[list[Decision], Decision | None] | None:
    """Return a list, to which the caller appends its Decision, and the Decision that the caller has to repeat.

    The second value is the forward's Decision for the same call, or None in a forward. Each option has its own list.
    Return None instead of the pair if the innermost hooks on saved tensors belong to no checkpoint.
    """
    hooks, name = saved_tensors_hooks(True), f"nf4_patch_{option}"
    if type(hooks) is not tuple:
        return None
    pack: Any = hooks[0]
    function: Any = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(function, "__globals__", None) is not vars(checkpoint):
        return None
    for cell in function.__closure__ or ():
        found = cell.cell_contents
        if type(found) is checkpoint._CheckpointFrame:  # the forward
            return vars(found).setdefault(name, []), None
        # The hook of a recompute holds a weak reference to the frame. Every recompute has a new hook.
        if type(found) is weakref.ref:
            earlier = vars(pack).setdefault(name, iter(getattr(found(), name, ())))
            return [], next(earlier, None)
    return None
