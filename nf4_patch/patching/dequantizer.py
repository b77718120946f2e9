"""Dequantize a packed weight with the kernel, or return the Reason why the original has to run."""

from __future__ import annotations

import functools
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
    """Return whether the packed weight requires a gradient and gradients are enabled. Packed weights of integer dtype never do."""
    return packed.requires_grad and torch.is_grad_enabled()


# PASSED_ON lists functions that only pass the dequantized weight on to their caller, by module.
PASSED_ON = {
    "unsloth.kernels.utils": "fast_dequantize",
    "unsloth_zoo.temporary_patches.bitsandbytes_large_tensors": "dequantize_4bit",
    "torch.utils._contextlib": "decorate_context",
}


def is_called_by(module: str) -> bool:
    """Return whether code of ``module`` called the replaced library function. For use in ``Dequantizer.of_state`` only.

    ``module`` is the start of a module's name, "unsloth." for example. A function in PASSED_ON only passes the weight
    on. If the library function was called by such a function, the caller of that function is checked instead.
    """
    try:  # frame 1 is of_state, 2 the adapter, 3 the replacement, 4 its caller
        frame: FrameType | None = sys._getframe(4)
    except ValueError:  # no Python code called the replacement
        return False
    while frame is not None:
        name: str = frame.f_globals.get("__name__") or ""
        if name not in PASSED_ON or frame.f_code.co_name != PASSED_ON[name]:
            return name.startswith(module)
        frame = frame.f_back
    return False


class Reader:
    """The part of the weight cache that ``Dequantizer`` uses. This base class caches nothing.

    The core does not import the cache. When cache/store.py is imported, it replaces the global ``reader`` with the
    cache.
    """

    on = False  # while False, ``read`` is not called

    def read(self, weight: PackedWeight, decode: Callable[[PackedWeight], Tensor | Reason]) -> Tensor | Reason | None:
        """Return the cached dense weight, which must not be written to, or None if the caller has to decode the weight."""


reader = Reader()


class Dequantizer:
    """Dequantizes weights for one target, and counts its hits.

    Args:
        target: the target's name.
        readers: start of the names of modules that only read the result, such as "unsloth.". Callers in other modules get a new
            tensor, never a cached one. With "", callers are not checked, and the argument ``only_read`` alone decides.
    """

    def __init__(self, target: str, readers: str = ""):
        self.target, self.readers = target, readers
        self.fallbacks = Fallbacks(target)
        self.classes: dict[type, bool] = {}  # results of ``returns_tensors``

    def of_state(
        self, packed: Tensor, state: Any, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        """Dequantize the packed weight of a QuantState: call ``run``, or ``trace`` for a tensor subclass inside torch.compile."""
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
        # while torch.compile traces, a tensor may be a FakeTensor
        return self.trace(packed, state, out) if torch.compiler.is_compiling() else Reason.TENSOR_SUBCLASS

    def trace(self, packed: Tensor, state: Any, out: Tensor | None = None, *where: bool) -> Tensor | Reason:
        """Dequantize inside a region that torch.compile traces, by calling the op.

        The op's fake implementation checks the guards.

        Raises:
            ValueError: the Reason is CPU_PACKING. Dynamo then breaks the graph and runs the call eagerly, or raises an error.
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
        # The op's fake implementation checks this too. It is checked here so that a graph for the CPU has no call of the op.
        if not runtime.runs_on(packed):
            return Reason.NOT_CUDA
        return op.dequantize(*fields)

    def run(
        self, weight: PackedWeight, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        """Return the dequantized weight, or the Reason why the kernel cannot run.

        An unchanged weight reuses the launch of its previous call.

        Args:
            out: tensor to fill and return. For a transposed weight, its transpose is returned.
            into_buffer: allow a result in the shared buffer, which the next such call overwrites.
            only_read: the caller does not write to the result, so that a cached tensor may be returned.
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
        except (AttributeError, KeyError, TypeError, RuntimeError):  # weight new to this target, or field not hashable
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
        """Check the guards and build the weight's launch, or return the Reason why the kernel cannot run."""
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
        # Copied bytes, such as those of the chosen experts of a stack, have no parameter as owner, and are not counted
        # as a weight.
        if isinstance(weight.owner(), torch.nn.Parameter):
            counter.addresses.add(weight.packed.data_ptr())
        return counter

    def dispatch(self, weight: PackedWeight, out: Tensor | None) -> Tensor | Reason:
        """Dequantize by calling the op, so that dispatch modes see the call. Hits are not counted."""
        if is_exporting():
            return Reason.EXPORTING
        reason = self.why_not(weight) if out is None else Reason.OUT_MISMATCH
        return op.dequantize(*weight) if reason is None else reason


def served(readers: str = "") -> Callable[[Function], Callable[[Any, Function], Function]]:
    """Return a decorator for adapters. An adapter maps a library function's arguments to those of ``of_state``.

    The decorator turns an adapter into a factory: a function that makes the replacement of a library function. Rows in
    targets.py name the factory in ``replace``. The replacement calls ``adapter(serve, *arguments)`` with its own
    arguments. ``serve`` is ``Dequantizer.of_state`` or, while torch.compile traces, ``Dequantizer.trace``. The adapter
    returns the result of ``serve``, or a Reason.

    Args:
        readers: see Dequantizer.
    """

    def make(adapter: Function, target: Any, original: Function) -> Function:
        dequantizer = Dequantizer(target.name, readers)
        trace = dequantizer.trace

        def traced(*args: Any, **kwargs: Any) -> Tensor | Reason:
            result: Tensor | Reason = adapter(trace, *args, **kwargs)
            return result

        attempt = MethodType(adapter, dequantizer.of_state)
        return replacement_of(target, original, dequantizer.fallbacks, attempt, traced, refuses=True)

    return lambda adapter: functools.partial(make, adapter)


for method in (Dequantizer.of_state, Dequantizer.run):
    keep_dynamo_out(method)
