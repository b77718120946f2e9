"""What PyTorch is doing around a call: compiling, exporting, tracing, dispatching to a mode, transforming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

is_compiling = torch.compiler.is_dynamo_compiling  # torch.export without Dynamo runs under a dispatch mode
is_jit_tracing = torch._C._is_tracing  # torch.jit.trace: a shape then holds tensors, so that no launch is found
modes_active = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack  # how many; PyTorch's default device is one too
transforms_active = torch._C._functorch.peek_interpreter_stack
backward_in_progress: Callable[[], int] = torch._C._current_graph_task_id  # -1: none
# Without it Params4bit's __torch_function__ runs, in Python: 1.4 us for each data_ptr() (2-core CPU machine, Python 3.11).
plain_methods = torch._C.DisableTorchFunctionSubclass
# PyTorch before 2.8 does not say whether hooks on saved tensors are in force: taken for yes.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True
)
PLAIN = {torch.Tensor, torch.nn.Parameter}  # classes that leave their operators and results alone
own_dispatch = torch._C._disabled_torch_dispatch_impl  # the __torch_dispatch__ of a class that has none
own_function = torch._C._disabled_torch_function_impl  # the __torch_function__ of nn.Parameter


def returns_tensors(cls: type) -> bool:
    """Whether an operator on this class returns plain tensors, as one on Tensor, nn.Parameter and Params4bit does."""
    if cls is torch.Tensor:
        return True
    if cls.__torch_dispatch__ is not own_dispatch:  # type: ignore[attr-defined]
        return False
    function: Any = cls.__torch_function__  # type: ignore[attr-defined]
    return function is own_function or getattr(function, "__module__", "") == "bitsandbytes.nn.modules"


def function_mode_active() -> bool:
    """Whether a TorchFunctionMode that is not PyTorch's own sees what is called. Written to be traced.

    PyTorch's own set the default device, or record a graph, in which the op is what a dispatch mode sees.
    """
    return any(not type(mode).__module__.startswith("torch.") for mode in _get_current_function_mode_stack())


class PlainFunction(torch.autograd.Function):
    """An autograd function that is never called under functorch's transforms.

    ``torch.autograd.Function.apply`` prepares the call for them in Python: 4 us of 9 (2-core CPU machine).
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


def is_exporting() -> bool:
    """The flag and not ``torch.compiler.is_exporting()``, which PyTorch 2.11's Dynamo takes for True in every graph."""
    return torch.compiler._is_exporting_flag


if torch.__version__ < (2, 8):  # type: ignore[operator]

    def is_exporting() -> bool:
        """In PyTorch 2.6 only torch.export raises the flag of compiling; neither 2.6 nor 2.7 raises one while Dynamo traces."""
        if getattr(torch.compiler, "_is_exporting_flag", torch.compiler._is_compiling_flag):
            return True
        tracer = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
        return tracer is not None and tracer.export

    # As torch.compiler.assume_constant_result, which imports Dynamo: it calls the function instead of tracing it.
    is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep_dynamo_out(function: Callable[..., Any]) -> None:
    """Dynamo traces neither this function nor what it calls, at no cost a call; inlined frames are not touched.

    Inductor skips a frame with bf16 in it below sm_80 (T4). The frame then runs eagerly, but Dynamo looks into every
    function that it calls, and would compile the host path piece by piece. PyTorch 2.6 has no such switch.
    """
    evaluation = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "_FrameExecStrategy") and hasattr(evaluation, "set_code_exec_strategy"):
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(function.__code__, evaluation._FrameExecStrategy(skip, skip))


def casts(A: torch.Tensor) -> bool:
    """Whether autocast makes the original multiply in another dtype than A's."""
    device = A.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not A.dtype
