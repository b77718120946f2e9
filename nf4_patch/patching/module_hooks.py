"""Detect module hooks and a replaced ``forward``.

Code that computes a module's result without calling the module would skip them.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn.modules import module as torch_module
from torch.utils import _contextlib as torch_decorators

from .placement import is_ours
from .targets import MODULES

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
PLACED = MODULES["hooks of placed modules"]
HOOKS_ON_ALL = [getattr(torch_module, f"_global{kind}") for kind in HOOKS]  # PyTorch's dicts of hooks on all modules


def is_called_otherwise(module: Any, known: tuple[Any, ...] = ()) -> bool:
    """Return whether a call of ``module`` runs code other than the ``forward`` of its class and the hooks in ``known``.

    A hook of accelerate that only moves inputs to another device does not count. Every module of a model on several GPUs
    has it.
    """
    own = vars(module)
    for kind in HOOKS:
        if own[kind] and any(hook not in known for hook in own[kind].values()):
            return True
    forward, hook = own.get("forward"), own.get("_hf_hook")
    if hook is None and forward is None:
        return False
    if hook is not None:
        library = sys.modules.get(PLACED)
        only_moves = library is not None and type(hook) is library.AlignDevicesHook and not hook.offload
        if not (only_moves and is_written_in(library, getattr(forward, "func", None))):
            return True
        forward = own.get("_old_forward")
    function = getattr(forward, "__func__", None)
    return forward is not None and function is not type(module).forward and not is_ours(function)


def is_written_in(module: Any, function: Any) -> bool:
    """Return whether ``function``, without PyTorch's decorators around it, is defined in ``module``."""
    while getattr(function, "__globals__", None) is vars(torch_decorators):
        function = function.__wrapped__
    return getattr(function, "__globals__", None) is vars(module)
