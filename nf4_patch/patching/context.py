"""Find out in which context a call runs: compilation, export, tracing, dispatch modes or functorch transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .reasons import Reason
from .targets import MODULES

# Whether Dynamo traces. torch.export(strict=False) does not use Dynamo, so callers recognize such an export by its
# dispatch mode instead.
is_compiling = torch.compiler.is_dynamo_compiling
is_jit_tracing = torch._C._is_tracing
modes_active = torch._C._len_torch_dispatch_stack
# The number of active TorchFunctionModes. torch.set_default_device activates such a mode too.
function_modes = torch._C._len_torch_function_stack
transforms_active = torch._C._functorch.peek_interpreter_stack
backward_in_progress: Callable[[], int] = torch._C._current_graph_task_id  # returns -1 outside of a backward
# Inside ``with plain_methods()`` PyTorch does not call Params4bit's __torch_function__. That call would add 1.4 us to
# each data_ptr() (2-core CPU machine, Python 3.11).
plain_methods = torch._C.DisableTorchFunctionSubclass
# The innermost saved-tensor hooks, or None if there are none. PyTorch before 2.8 cannot tell, so True is returned there,
# and callers assume that there are hooks.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True
)
batched: Any = torch._C._parse_dispatch_key("Batched")  # the dispatch key of tensors under torch.autograd's own vmap
LAYERS = MODULES["4-bit layers"]  # the Python module of the class of packed parameters
PLAIN = {torch.Tensor, torch.nn.Parameter}  # the classes of tensors that override no operator
MODES = Reason.FUNCTION_MODE, Reason.DISPATCH_MODE  # a recompute may ignore these results of ``watched``
own_dispatch = torch._C._disabled_torch_dispatch_impl  # the __torch_dispatch__ of classes that do not define it
own_function = torch._C._disabled_torch_function_impl  # the __torch_function__ of nn.Parameter


def returns_tensors(cls: type) -> bool:
    """Return whether PyTorch's operators return plain tensors for inputs of this class.

    They might not for a class with its own ``__torch_dispatch__`` or ``__torch_function__``, except for bitsandbytes'
    Params4bit.
    """
    if cls is torch.Tensor:
        return True
    if cls.__torch_dispatch__ is not own_dispatch:  # type: ignore[attr-defined]
        return False
    function: Any = cls.__torch_function__  # type: ignore[attr-defined]
    return function is own_function or getattr(function, "__module__", "") == LAYERS


def function_mode_active() -> bool:
    """Return whether a TorchFunctionMode is active that is not PyTorch's own. Dynamo can trace this function.

    PyTorch's own modes set the default device or record a graph, and both work with nf4_patch's custom op.
    """
    return any(not type(mode).__module__.startswith("torch.") for mode in _get_current_function_mode_stack())


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether vmap (``is_grads_batched=True``) batches ``tensor``."""
    return bool(torch._C._dispatch_keys(tensor).has(batched))


def watched(gradient: torch.Tensor | None = None) -> Reason | None:
    """Return the Reason why PyTorch has to see every operation of this eager call, or None.

    Transforms and traces are checked first, because no call may ignore them, while a recompute may ignore ``MODES``. A
    backward passes its ``gradient``.
    """
    if transforms_active() is not None or (gradient is not None and is_batched(gradient)):
        return Reason.FUNCTORCH_TRANSFORM
    if is_jit_tracing():
        return Reason.EXPORTING
    if function_modes() and function_mode_active():
        return Reason.FUNCTION_MODE
    if modes_active():
        return Reason.EXPORTING if is_exporting() else Reason.DISPATCH_MODE
    return None if gradient is None or type(gradient) in PLAIN else Reason.TENSOR_SUBCLASS


def only_keeps_results() -> bool:
    """Return whether all active dispatch modes belong to selective checkpointing. They keep results, and change none."""
    return all(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())


def watched_trace() -> Reason | None:
    """Do the checks of ``watched`` that apply to a traced call. Dynamo traces this function too."""
    if function_modes() and function_mode_active():
        return Reason.FUNCTION_MODE
    return Reason.EXPORTING if is_exporting() else None


class PlainFunction(torch.autograd.Function):
    """Base class of autograd functions that are never called under functorch transforms.

    Its ``apply`` skips the Python code for them, which saves 4 of 9 us per call (2-core CPU machine).
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


def is_exporting() -> bool:
    """Return whether torch.export is active.

    ``torch.compiler.is_exporting()`` is not used, because Dynamo in PyTorch 2.11 treats that function as True in every
    trace, even for torch.compile.
    """
    return torch.compiler._is_exporting_flag


if torch.__version__ < (2, 8):  # type: ignore[operator]

    def is_exporting() -> bool:
        """Return whether torch.export is active.

        PyTorch 2.6 and 2.7 set no flag while Dynamo traces for an export, so read ``export`` from Dynamo's current tracer.
        """
        if getattr(torch.compiler, "_is_exporting_flag", torch.compiler._is_compiling_flag):
            return True
        tracer = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
        return tracer is not None and tracer.export

    # This attribute tells Dynamo to call the function instead of tracing it. torch.compiler.assume_constant_result
    # would set the attribute too, but would also import Dynamo.
    is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep_dynamo_out(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling ``function`` and the functions that it calls, when an eager caller calls it.

    A compiled caller still includes the function in its own graph. On PyTorch 2.6, nothing is done.
    """
    # On GPUs below sm_80, such as the T4, Inductor does not compile frames that use bf16. Such a frame runs eagerly, and Dynamo
    # would compile each function that the frame calls. ``torch._dynamo.disable`` also prevents this, but makes each call slower
    # by wrapping the function. PyTorch 2.6 has only that way.
    evaluation = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "_FrameExecStrategy") and hasattr(evaluation, "set_code_exec_strategy"):
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(function.__code__, evaluation._FrameExecStrategy(skip, skip))


def casts(A: torch.Tensor) -> bool:
    """Return whether autocast makes the original matmul cast ``A``."""
    device = A.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not A.dtype
