"""From a weight and its quantization state to the dequantized weight, or the Reason why the original has to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.dequantize import launch as launches
from ..nf4.layout import Layout, identity
from . import guards, op
from .cache import cache
from .context import is_exporting, is_jit_tracing, keep_dynamo_out, modes_active, own_dispatch, transforms_active
from .counters import counters, logger
from .quant_state import fields_of, remembered_code
from .reasons import Reason, Uncached
from .switch import switch


class Dequantizer:
    """Dequantizes the weights of one target."""

    def __init__(self, target: str):
        self.target = target
        self.memo = runtime.Memo()
        self.launches = self.memo.launches
        self.failure = self.error = ""  # the latest KERNEL_FAILED and the latest ERROR, in full

    def run(
        self, weight: torch.Tensor, state: Any, out: torch.Tensor | None = None, shared: bool = False, plain: bool = False
    ) -> Any:  # fmt: skip
        """The dequantized weight of a QuantState, or the Reason why not. A remembered launch is found at once.

        Args:
            out: filled and returned (transposed for a transposed weight).
            shared: the result may live in a buffer that the next such call overwrites.
            plain: the weight's methods are Tensor's own, whatever its class.
        """
        if not plain and type(weight) is not torch.Tensor:
            return self.run_subclass(weight, state, out, shared)
        launch = None
        if out is None and not modes_active() and transforms_active() is None:
            try:  # not through fields_of, which takes 0.35 us (2-core CPU machine, Python 3.11)
                second = state.state2
                if second is None:
                    launch = self.launches.get(
                        identity(
                            state.quant_type, weight, state.absmax, None, None, None, None,
                            state.blocksize, 0, state.shape, state.dtype,
                        )
                    )  # fmt: skip
                else:
                    launch = self.launches.get(
                        identity(
                            state.quant_type, weight, state.absmax, None, second.absmax, second.code, state.offset,
                            state.blocksize, second.blocksize, state.shape, state.dtype,
                        )
                    )  # fmt: skip
            except (AttributeError, TypeError):  # no QuantState, a field is no tensor, or the shape a list
                pass
        if launch is None:
            fields = fields_of(state)
            if type(fields) is Reason:
                return fields
            return self.run_fields(weight, fields, state.quant_type, state, out, shared)
        result = launch.shared() if shared else launch.new()
        launch.counter.hits += 1
        return result

    def run_subclass(self, weight: torch.Tensor, state: Any, out: torch.Tensor | None, shared: bool) -> Any:
        if not isinstance(weight, torch.Tensor):
            return Reason.ARGUMENTS
        if type(weight).__torch_dispatch__ is own_dispatch:
            # Params4bit has a Python __torch_function__: 1.4 us for each data_ptr() without this.
            with torch._C.DisableTorchFunctionSubclass():
                return self.run(weight, state, out, shared, True)
        if torch.compiler.is_compiling():
            return self.trace(weight, state, out)
        fields = fields_of(state)
        return fields if type(fields) is Reason else Reason.TENSOR_SUBCLASS

    def trace(self, weight: torch.Tensor, state: Any, out: torch.Tensor | None = None) -> Any:
        """As ``run``, inside a region that torch.compile traces: through the op, whose fake asks the guards."""
        reason = guards.state_is_odd(state)
        if reason is not None:
            return reason
        if is_exporting():
            return Reason.EXPORTING
        if out is not None:
            return Reason.OUT_MISMATCH
        if not (weight.is_cuda or compilation.INTERPRETED):  # asked here too: on a CPU nothing would run
            return Reason.NOT_CUDA
        fields = fields_of(state)
        return fields if type(fields) is Reason else op.dequantize(weight, *fields)

    def run_fields(self, weight, fields, quant_type, state=None, out=None, shared=False) -> Any:
        """As ``run``, of the fields of a Layout after ``packed``."""
        if modes_active():
            return self.dispatch(Layout(weight, *fields), state, out)
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
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
            if guards.check_out(out, Layout(weight, *fields)) is not None or out.data_ptr() % 16:
                return Reason.OUT_MISMATCH
            result = launch.into(out)
        elif shared:
            result = launch.shared()
        else:
            result = launch.new()
        launch.counter.hits += 1
        return result

    def cached(self, weight, fields, quant_type, state=None, backward=False) -> Any:
        """For a caller that only reads the result: the cached weight, or one that is cached from now on.

        None: go on as without the cache. A Reason is possible too.
        """
        if modes_active() or transforms_active() is not None:
            return None
        try:
            found = cache.find(weight, fields, quant_type, backward)
            if found is None:
                return cache.keep(
                    weight, fields, quant_type, lambda: self.run_fields(weight, fields, quant_type, state), backward
                )
        except (AttributeError, RuntimeError):
            tensors = [weight, *(fields[i] for i in (0, 2, 3, 4) if fields[i] is not None)]
            if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                return None  # the guards say which
            if not any(tensor.is_inference() for tensor in tensors):
                raise
            cache.uncached[Uncached.INFERENCE_TENSOR] += 1
            return None
        if switch.strict:
            cache.compare(found, self.run_fields(weight, fields, quant_type, state))
        return found

    def cached_state(self, weight, state, backward) -> Any:
        """As ``cached``, of a QuantState."""
        fields = fields_of(state)
        if type(fields) is Reason:
            return None
        if type(weight) is torch.Tensor:
            return self.cached(weight, fields, state.quant_type, state, backward)
        if getattr(type(weight), "__torch_dispatch__", None) is not own_dispatch:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return self.cached(weight, fields, state.quant_type, state, backward)

    def read(self, weight: torch.Tensor, state: Any) -> Any:
        """As ``run``, for a caller that only reads the result: from the weight cache where that has a size."""
        found = self.cached_state(weight, state, True) if cache.sized else None
        return self.run(weight, state) if found is None else found

    def unsupported(self, layout: Layout, state: Any) -> Reason | None:
        """Why the kernel must not run on this layout; None if it may."""
        reason = guards.state_is_odd(state) if state is not None else None
        return reason or guards.check(layout)

    def with_code(self, layout: Layout, quant_type: str) -> Layout | Reason:
        """The layout with the code of its quant_type: bitsandbytes goes by the name and never reads ``state.code``."""
        if is_jit_tracing():
            return Reason.EXPORTING
        code = remembered_code(quant_type, layout.packed.device)
        return code if isinstance(code, Reason) else layout._replace(code=code)

    def resolve(self, layout: Layout, quant_type: str, state: Any) -> Any:
        """A launch that passed the guards and is then remembered, or the Reason why there is none."""
        coded = self.with_code(layout, quant_type)
        if isinstance(coded, Reason):
            return coded
        reason = self.unsupported(coded, state)
        if reason is not None:
            return reason
        try:
            launch = launches.Launch(coded, coded.transposed())
        except runtime.KernelUnavailable as error:
            return self.unavailable(error)
        launch.counter = counters.of(self.target, tuple(layout.shape), str(layout.dtype))
        launch.counter.addresses.add(layout.packed.data_ptr())
        return self.memo.remember(identity(quant_type, *layout._replace(shape=tuple(layout.shape))), launch)

    def unavailable(self, error: runtime.KernelUnavailable) -> Reason:
        reason = Reason[error.reason]
        if reason is Reason.KERNEL_FAILED:
            self.failure = str(error)
        return reason

    def interpret(self, layout: Layout, quant_type: str, state: Any, out: torch.Tensor | None) -> Any:
        """As ``run``, under Triton's interpreter: nothing is remembered."""
        coded = self.with_code(layout, quant_type)
        if isinstance(coded, Reason):
            return coded
        reason = self.unsupported(coded, state) or (guards.check_out(out, coded) if out is not None else None)
        if reason is not None:
            return reason
        result = launches.dequantize(coded, out)
        counter = counters.of(self.target, tuple(layout.shape), str(layout.dtype))
        counter.addresses.add(layout.packed.data_ptr())
        counter.hits += 1
        return result.t() if layout.transposed() else result

    def dispatch(self, layout: Layout, state: Any, out: torch.Tensor | None) -> Any:
        """Through the op, which dispatch modes see; nothing is counted."""
        if is_exporting() or is_jit_tracing():
            return Reason.EXPORTING
        reason = self.unsupported(layout, state) if out is None else Reason.OUT_MISMATCH
        return op.dequantize(*layout) if reason is None else reason

    def failed(self, error: Exception) -> Reason:
        """Our own error never stops a training that would have worked: logged, named, counted."""
        if switch.strict or isinstance(error, torch.cuda.OutOfMemoryError):
            raise error
        self.error = f"{type(error).__name__}: {error}"
        if self.error not in counters.errors:  # a step makes hundreds of calls: one traceback is enough
            logger.error("nf4_patch failed in %s; the original runs", self.target, exc_info=error)
        return Reason.INTERNAL_ERROR

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result, or the Reason why there is none, counted."""
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            result = self.failed(error)
        if type(result) is Reason:
            self.fall_back(result)
        return result

    def fall_back(self, reason: Reason) -> None:
        detail = {Reason.KERNEL_FAILED: self.failure, Reason.INTERNAL_ERROR: self.error}.get(reason, "")
        counters.fall_back(self.target, reason, switch.strict, detail)


for method in (
    Dequantizer.run, Dequantizer.run_fields, Dequantizer.read, Dequantizer.cached, Dequantizer.cached_state,
):  # fmt: skip
    keep_dynamo_out(method)
