"""Find out in which context a call runs: compilation, export, tracing, dispatch modes or functorch transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

# is_compiling is False under torch.export(strict=False), which does not use Dynamo. Callers recognize such an export by
# its dispatch mode.
is_compiling = torch.compiler.is_dynamo_compiling
# Dequantizer checks is_jit_tracing only for new weights. Under torch.jit.trace shapes hold tensors, which match no remembered
# launch, so every weight is new.
is_jit_tracing = torch._C._is_tracing
modes_active = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack  # returns the number of modes; torch.set_default_device adds one
transforms_active = torch._C._functorch.peek_interpreter_stack
backward_in_progress: Callable[[], int] = torch._C._current_graph_task_id  # returns -1 outside of a backward
# plain_methods() skips Params4bit's __torch_function__, which takes 1.4 us for each data_ptr() (2-core CPU machine, Python 3.11).
plain_methods = torch._C.DisableTorchFunctionSubclass
# saved_tensors_hooks returns the innermost hooks on saved tensors, or None. PyTorch before 2.8 has no such function. Its
# substitute always returns True, so that callers assume that there are hooks.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True
)
PLAIN = {torch.Tensor, torch.nn.Parameter}  # classes whose operators behave as usual and return plain tensors
own_dispatch = torch._C._disabled_torch_dispatch_impl  # the __torch_dispatch__ of a class that has none
own_function = torch._C._disabled_torch_function_impl  # the __torch_function__ of nn.Parameter


def returns_tensors(cls: type) -> bool:
    """Return whether operators on this class return plain tensors, as for Tensor, nn.Parameter and Params4bit."""
    if cls is torch.Tensor:
        return True
    if cls.__torch_dispatch__ is not own_dispatch:  # type: ignore[attr-defined]
        return False
    function: Any = cls.__torch_function__  # type: ignore[attr-defined]
    return function is own_function or getattr(function, "__module__", "") == "bitsandbytes.nn.modules"


def function_mode_active() -> bool:
    """Return whether a TorchFunctionMode is active that is not part of PyTorch. Dynamo can trace this function.

    PyTorch's own modes set the default device or record a graph, and both work with the op.
    """
    return any(not type(mode).__module__.startswith("torch.") for mode in _get_current_function_mode_stack())


class PlainFunction(torch.autograd.Function):
    """Base class of autograd functions that are never called under functorch transforms.

    ``torch.autograd.Function.apply`` prepares each call for transforms in Python. Skipping this saves 4 of 9 us (2-core CPU
    machine).
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


def is_exporting() -> bool:
    """Return whether torch.export is active.

    ``torch.compiler.is_exporting()`` is not used, because Dynamo in PyTorch 2.11 treats it as True in every graph.
    """
    return torch.compiler._is_exporting_flag


if torch.__version__ < (2, 8):  # type: ignore[operator]

    def is_exporting() -> bool:
        """Return whether torch.export is active, for PyTorch 2.6 and 2.7, which set no flag while Dynamo traces for an export."""
        if getattr(torch.compiler, "_is_exporting_flag", torch.compiler._is_compiling_flag):
            return True
        tracer = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
        return tracer is not None and tracer.export

    # The mark tells Dynamo to call the function instead of tracing it. torch.compiler.assume_constant_result sets the same mark,
    # but would import Dynamo here.
    is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep_dynamo_out(function: Callable[..., Any]) -> None:
    """Make Dynamo run a function, and everything that it calls, without compiling it, if the caller runs eagerly.

    If Dynamo compiles the caller, it inlines and traces the function all the same. But on GPUs below sm_80, such as the
    T4, Inductor does not compile frames that use bf16. Such a frame runs eagerly, and Dynamo would compile each
    function that the frame calls. ``torch._dynamo.disable`` would add the cost of a wrapper to each call. PyTorch 2.6
    has no way to skip a function without that cost, so there this function does nothing.
    """
    evaluation = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "_FrameExecStrategy") and hasattr(evaluation, "set_code_exec_strategy"):
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(function.__code__, evaluation._FrameExecStrategy(skip, skip))


def casts(A: torch.Tensor) -> bool:
    """Return whether autocast makes the original function multiply in a dtype other than that of ``A``."""
    device = A.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not A.dtype
