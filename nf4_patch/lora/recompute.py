"""What the forward of a non-reentrant checkpoint decided about a layer, for the recompute of that forward.

peft's forward and ours save different tensors, and a checkpoint requires the same ones from forward and recompute. What the
decision depends on may have changed in between: FlopCounterMode, or a hook, may be active during the forward only.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from ..patching.reasons import Reason

Decision = Reason | bool  # why peft's forward ran, or True if ours did
NAME = "nf4_patch_lora"


def decisions_of(pack: Any) -> tuple[list[Decision], Decision | None] | None:
    """Return where to write the decision about the layer that is called now, and the decision of the forward in a recompute.

    Decisions are kept on the checkpoint's frame, in the order of calls, and live as long as the frame.

    Args:
        pack: the current hook that packs saved tensors.

    Returns:
        None if the hook is not a checkpoint's.
    """
    function = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(function, "__globals__", None) is not vars(checkpoint):
        return None
    for cell in function.__closure__ or ():
        found = cell.cell_contents
        if type(found) is checkpoint._CheckpointFrame:  # the forward
            return vars(found).setdefault(NAME, []), None
        if type(found) is weakref.ref:  # to the frame: the recompute, with a hook of its own each time
            earlier = vars(pack).setdefault(NAME, iter(getattr(found(), NAME, ())))
            return [], next(earlier, None)
    return None
