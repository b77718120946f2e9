"""From a packed weight to the dequantized one, or the Reason why the original has to run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import launch as launches
from ..nf4.weight import PackedWeight
from . import guards, op
from .context import (
    function_mode_active,
    function_modes,
    is_exporting,
    is_jit_tracing,
    keep_dynamo_out,
    modes_active,
    plain_methods,
    returns_tensors,
    transforms_active,
)
from .counters import HitCounter, counters
from .quant_state import fields_of, new
from .reasons import Reason
from .replacement import Fallbacks, Function, replacement_of


def has_gradient(packed: Tensor) -> bool:
    """Whether an operator on the packed weight would ask for a gradient: only one stored as floating point can."""
    return packed.requires_grad and torch.is_grad_enabled()


# Functions that return what they get, by their module: Unsloth's public one, unsloth_zoo's wrapper for large weights, and PyTorch's
# decorators.
PASSED_ON = {
    "unsloth.kernels.utils": "fast_dequantize",
    "unsloth_zoo.temporary_patches.bitsandbytes_large_tensors": "dequantize_4bit",
    "torch.utils._contextlib": "decorate_context",
}


def is_called_by(module: str) -> bool:
    """Whether the replacement above ``of_state`` is called by code of ``module``, or of a package "name.".

    Frames of PASSED_ON are passed over.
    """
    try:  # of_state is frame 1, the adapter 2, the replacement 3
        frame: FrameType | None = sys._getframe(4)
    except ValueError:  # called by no Python code
        return False
    while frame is not None:
        name: str = frame.f_globals.get("__name__") or ""
        if name not in PASSED_ON or frame.f_code.co_name != PASSED_ON[name]:
            return name.startswith(module)
        frame = frame.f_back
    return False


class Reader:
    """Answers calls that only read their result; an option puts its own in the place of ``reader``."""

    on = False  # all that a call looks at

    def read(self, weight: PackedWeight, decode: Callable[[PackedWeight], Tensor | Reason]) -> Tensor | Reason | None:
        """The weight as it is kept, not to be written into, or None where it has to be decoded."""


reader = Reader()


class Dequantizer:
    """Dequantizes the weights of one target.

    Args:
        target: its name.
        readers: of a public function, see ``Target.readers``. Whoever else calls it gets memory of its own.
    """

    def __init__(self, target: str, readers: str = ""):
        self.target, self.readers = target, readers
        self.fallbacks = Fallbacks(target)
        self.classes: dict[type, bool] = {}  # ``returns_tensors`` of each

    def of_state(
        self, packed: Tensor, state: Any, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        """As ``run``, of the packed weight of a QuantState, whatever its class."""
        fields = fields_of(packed, state)
        if type(fields) is Reason:
            return fields
        weight: PackedWeight = new(PackedWeight, fields)
        if only_read and reader.on and self.readers:
            only_read = is_called_by(self.readers)
        if type(packed) is Tensor:
            return self.run(weight, out, into_buffer, only_read)
        plain = self.classes.get(type(packed))
        if plain is None:
            if not isinstance(packed, Tensor):
                return Reason.ARGUMENTS
            plain = self.classes[type(packed)] = returns_tensors(type(packed))
        if plain:
            with plain_methods():
                return self.run(weight, out, into_buffer, only_read)
        # inside a traced region every tensor may be a FakeTensor
        return self.trace(packed, state, out) if torch.compiler.is_compiling() else Reason.TENSOR_SUBCLASS

    def trace(self, packed: Tensor, state: Any, out: Tensor | None = None, *where: bool) -> Tensor | Reason:
        """As ``of_state``, inside a region that torch.compile traces: through the op, whose fake asks the guards.

        Raises:
            ValueError: CPU_PACKING. Dynamo then leaves the call to eager code, or raises an error itself.
        """
        fields = fields_of(packed, state)
        if isinstance(fields, Reason):
            if fields is Reason.CPU_PACKING:
                raise ValueError(fields.sentence)
            return fields
        if function_modes() and function_mode_active():
            return Reason.FUNCTION_MODE
        if is_exporting():
            return Reason.EXPORTING
        if out is not None:
            return Reason.OUT_MISMATCH
        if has_gradient(packed):
            return Reason.REQUIRES_GRAD
        if not runtime.runs_on(packed):  # asked here too: on a CPU nothing would run
            return Reason.NOT_CUDA
        return op.dequantize(*fields)

    def run(
        self, weight: PackedWeight, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        """The dequantized weight, or the Reason why not. A weight that was seen before, unchanged, has its launch at once.

        Args:
            out: filled and returned (transposed for a transposed weight).
            into_buffer: the result may live in a buffer that the next such call overwrites.
            only_read: the caller writes into no result: it may be handed one that is kept.
        """
        if function_modes() and function_mode_active():
            return Reason.FUNCTION_MODE
        if modes_active():
            return self.dispatch(weight, out)
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
        if only_read and reader.on and out is None:
            found = reader.read(weight, self.run)
            if found is not None:
                return found
        launch: Any
        try:
            launch = weight.memo().launch
            counter = launch.counters[self]
        except (AttributeError, KeyError, TypeError, RuntimeError):  # new to this target, or what cannot be a key
            launch = None
        if launch is None:
            launch = self.resolve(weight)
            if type(launch) is Reason:
                return launch
            counter = launch.counters[self]
        if launch.differentiable and has_gradient(weight.packed):
            return Reason.REQUIRES_GRAD
        result: Tensor
        if out is not None:
            if not launch.accepts(out):
                return Reason.OUT_MISMATCH
            result = launch.into(out)
        else:
            result = launch.into_buffer() if into_buffer else launch.run()
        counter.hits += 1
        return result

    def why_not(self, weight: PackedWeight, out: Tensor | None = None) -> Reason | None:
        if is_jit_tracing():
            return Reason.EXPORTING
        if has_gradient(weight.packed):
            return Reason.REQUIRES_GRAD
        return guards.why_not(weight, out=out)

    def resolve(self, weight: PackedWeight) -> launches.Launch | Reason:
        """The launch of a weight that passed the guards, or the Reason why there is none."""
        reason = self.why_not(weight)
        if reason is not None:
            return reason
        weight = weight._replace(shape=tuple(weight.shape))
        try:
            launch = launches.remembered(weight)
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        launch.counters[self] = self.counter_of(weight)
        return launch

    def counter_of(self, weight: PackedWeight) -> HitCounter:
        counter = counters.of(self.target, tuple(weight.shape), str(weight.dtype))
        if isinstance(weight.owner(), torch.nn.Parameter):  # and no copy of some experts
            counter.addresses.add(weight.packed.data_ptr())
        return counter

    def dispatch(self, weight: PackedWeight, out: Tensor | None) -> Tensor | Reason:
        """Through the op, which dispatch modes see; nothing is counted."""
        if is_exporting():
            return Reason.EXPORTING
        reason = self.why_not(weight) if out is None else Reason.OUT_MISMATCH
        return op.dequantize(*weight) if reason is None else reason


def served(adapter: Function) -> Any:
    """A maker of replacements, for a row to name: ``adapter(serve, *arguments)`` maps the original's arguments to those of
    ``Dequantizer.of_state``, and calls ``serve`` with them, for eager and for traced calls.
    """

    def make(target: Any, original: Function) -> Function:
        dequantizer = Dequantizer(target.name, target.readers)
        trace = dequantizer.trace

        def traced(*args: Any, **kwargs: Any) -> Tensor | Reason:
            result: Tensor | Reason = adapter(trace, *args, **kwargs)
            return result

        attempt = MethodType(adapter, dequantizer.of_state)
        return replacement_of(target, original, dequantizer.fallbacks, attempt, traced, refuses=True)

    return make


for method in (Dequantizer.of_state, Dequantizer.run):
    keep_dynamo_out(method)
