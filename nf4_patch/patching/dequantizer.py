"""From a weight and its quantization state to the dequantized weight, or the Reason why the original has to run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.dequantize import launch as launches
from ..nf4.layout import Layout, identity
from . import guards, op
from .context import is_exporting, is_jit_tracing, keep_dynamo_out, modes_active, own_dispatch, transforms_active
from .counters import HitCounter, counters
from .quant_state import Fields, fields_of, remembered_code
from .reasons import Reason
from .replacement import Fallbacks

own_function = torch._C._disabled_torch_function_impl  # the __torch_function__ of nn.Parameter


def returns_tensors(cls: type) -> bool:
    """Whether an operator on this tensor class returns plain tensors, as one on nn.Parameter and Params4bit does."""
    if cls.__torch_dispatch__ is not own_dispatch:  # type: ignore[attr-defined]
        return False
    function: Any = cls.__torch_function__  # type: ignore[attr-defined]
    return function is own_function or getattr(function, "__module__", "") == "bitsandbytes.nn.modules"


def has_gradient(weight: Tensor) -> bool:
    """Whether an operator on the weight would ask for a gradient: only one stored as floating point can."""
    return weight.requires_grad and torch.is_grad_enabled()


def unsupported(layout: Layout, state: Any) -> Reason | None:
    """Why the kernel must not run on this layout; None if it may."""
    reason = guards.check_quant_state(state) if state is not None else None
    return reason or guards.check(layout)


def supported(layout: Layout, quant_type: str, state: Any) -> Layout | Reason:
    """The layout as the kernel takes it, or why it must not: with the code of its quant_type, by whose name bitsandbytes
    goes; it never reads ``state.code``.
    """
    if is_jit_tracing():
        return Reason.EXPORTING
    code = remembered_code(quant_type, layout.packed.device)
    if type(code) is Reason:
        return code
    coded = layout._replace(code=code)
    return unsupported(coded, state) or coded


class Dequantizer:
    """Dequantizes the weights of one target."""

    def __init__(self, target: str):
        self.target = target
        self.fallbacks = Fallbacks(target)
        self.launches = runtime.Memo()
        self.classes: dict[type, bool] = {Tensor: True}  # ``returns_tensors`` of each

    def run(
        self, weight: Tensor, state: Any, out: Tensor | None = None, shared: bool = False, plain: bool = False
    ) -> Tensor | Reason:
        """The dequantized weight of a QuantState, or the Reason why not. A remembered launch is found at once.

        Args:
            out: filled and returned (transposed for a transposed weight).
            shared: the result may live in a buffer that the next such call overwrites.
            plain: the weight's methods are Tensor's own, whatever its class.
        """
        if not plain and type(weight) is not Tensor:
            return self.run_subclass(weight, state, out, shared)
        launch: launches.Launch | None = None
        if not modes_active() and transforms_active() is None:
            try:  # not through fields_of, which takes 0.35 us (2-core CPU machine, Python 3.11)
                second = state.state2
                if second is None:
                    key = identity(
                        state.quant_type, weight, state.absmax, None, None, None, None,
                        state.blocksize, 0, state.shape, state.dtype,
                    )  # fmt: skip
                else:
                    key = identity(
                        state.quant_type, weight, state.absmax, None, second.absmax, second.code, state.offset,
                        state.blocksize, second.blocksize, state.shape, state.dtype,
                    )  # fmt: skip
                launch = self.launches.get(key)
            except (AttributeError, TypeError):  # no QuantState, a field is no tensor, or the shape a list
                pass
        if launch is None:
            fields = fields_of(state)
            if type(fields) is Reason:
                return fields
            return self.run_fields(weight, fields, state.quant_type, state, out, shared)
        if launch.differentiable and has_gradient(weight):
            return Reason.REQUIRES_GRAD
        if out is not None:
            return self.fill(launch, out)
        result = launch.shared() if shared else launch.run()
        launch.counter.hits += 1
        return result

    def fill(self, launch: launches.Launch, out: Tensor) -> Tensor | Reason:
        """``out``, filled (transposed for a transposed weight); or the Reason why not."""
        if not launch.accepts(out):
            return Reason.OUT_MISMATCH
        result = launch.into(out)
        launch.counter.hits += 1
        return result

    def run_subclass(self, weight: Tensor, state: Any, out: Tensor | None, shared: bool) -> Tensor | Reason:
        plain = self.classes.get(type(weight))
        if plain is None:
            if not isinstance(weight, Tensor):
                return Reason.ARGUMENTS
            plain = self.classes[type(weight)] = returns_tensors(type(weight))
        if plain:
            # Params4bit has a Python __torch_function__: 1.4 us for each data_ptr() without this.
            with torch._C.DisableTorchFunctionSubclass():
                return self.run(weight, state, out, shared, True)
        if torch.compiler.is_compiling():
            return self.trace(weight, state, out)
        fields = fields_of(state)
        return fields if type(fields) is Reason else Reason.TENSOR_SUBCLASS

    def trace(self, weight: Tensor, state: Any, out: Tensor | None = None) -> Tensor | Reason:
        """As ``run``, inside a region that torch.compile traces: through the op, whose fake asks the guards."""
        reason = guards.check_quant_state(state)
        if reason is not None:
            return reason
        if is_exporting():
            return Reason.EXPORTING
        if out is not None:
            return Reason.OUT_MISMATCH
        if has_gradient(weight):
            return Reason.REQUIRES_GRAD
        if not (weight.is_cuda or compilation.INTERPRETED):  # asked here too: on a CPU nothing would run
            return Reason.NOT_CUDA
        fields = fields_of(state)
        return fields if type(fields) is Reason else op.dequantize(weight, *fields)

    def run_fields(
        self,
        weight: Tensor,
        fields: Fields,
        quant_type: str,
        state: Any = None,
        out: Tensor | None = None,
        shared: bool = False,
    ) -> Tensor | Reason:
        """As ``run``, of the fields of a Layout after ``packed``."""
        if weight.requires_grad and torch.is_grad_enabled():  # as has_gradient, without a call
            return Reason.REQUIRES_GRAD
        if modes_active():
            return self.dispatch(Layout(weight, *fields), state, out)
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
        launch: launches.Launch | Reason | None
        try:
            launch = self.launches.get(identity(quant_type, weight, *fields))
        except (AttributeError, TypeError):  # the guards decide
            launch = None
        if launch is None:
            if compilation.INTERPRETED:
                return self.interpret(Layout(weight, *fields), quant_type, state, out)
            launch = self.resolve(Layout(weight, *fields), quant_type, state)
            if type(launch) is Reason:
                return launch
        if out is not None:
            return self.fill(launch, out)
        result = launch.shared() if shared else launch.run()
        launch.counter.hits += 1
        return result

    def resolve(self, layout: Layout, quant_type: str, state: Any) -> launches.Launch | Reason:
        """A launch that passed the guards and is then remembered, or the Reason why there is none."""
        coded = supported(layout, quant_type, state)
        if type(coded) is Reason:
            return coded
        try:
            launch = launches.Launch(coded, coded.transposed())
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        launch.counter = self.counter_of(layout)
        self.launches.remember(identity(quant_type, *layout._replace(shape=tuple(layout.shape))), launch)
        return launch

    def interpret(self, layout: Layout, quant_type: str, state: Any, out: Tensor | None) -> Tensor | Reason:
        """As ``run``, under Triton's interpreter: nothing is remembered."""
        coded = supported(layout, quant_type, state)
        if type(coded) is Reason:
            return coded
        if out is not None and (
            guards.check_out(out, coded) is not None
            or runtime.overlap(runtime.spans(*coded.operands()), *runtime.span(out))
        ):
            return Reason.OUT_MISMATCH
        result = launches.dequantize(coded, out)
        self.counter_of(layout).hits += 1
        return result.t() if layout.transposed() else result

    def counter_of(self, layout: Layout) -> HitCounter:
        counter = counters.of(self.target, tuple(layout.shape), str(layout.dtype))
        counter.addresses.add(layout.packed.data_ptr())
        return counter

    def dispatch(self, layout: Layout, state: Any, out: Tensor | None) -> Tensor | Reason:
        """Through the op, which dispatch modes see; nothing is counted."""
        if is_exporting() or is_jit_tracing():
            return Reason.EXPORTING
        reason = unsupported(layout, state) if out is None else Reason.OUT_MISMATCH
        return op.dequantize(*layout) if reason is None else reason


for method in (Dequantizer.run, Dequantizer.run_fields):
    keep_dynamo_out(method)
