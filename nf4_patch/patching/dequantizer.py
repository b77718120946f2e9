"""Dequantize a packed weight with the kernel, or return the Reason why the original function has to run instead."""

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
from .context import keep_dynamo_out, plain_methods, returns_tensors, watched, watched_trace
from .counters import counters
from .originals import PASSED_ON
from .quant_state import fields_of, new
from .reasons import Reason
from .replacement import Fallbacks, Function, replacement_of

REPLACEMENTS = replacement_of.__globals__  # the globals of each replacement, by which its frame is recognized


def has_gradient(packed: Tensor) -> bool:
    """Return whether autograd would compute a gradient of the packed weight. An integer tensor never has a gradient."""
    return packed.requires_grad and torch.is_grad_enabled()


def is_called_by(module: str) -> bool:
    """Return whether a module whose name starts with ``module`` called the library function, looking through PASSED_ON."""
    frame: FrameType | None = sys._getframe(2)  # skip this function and ``of_state``
    while frame is not None and frame.f_globals is not REPLACEMENTS:
        frame = frame.f_back
    while frame is not None and (frame := frame.f_back) is not None:
        name: str = frame.f_globals.get("__name__") or ""
        if name not in PASSED_ON or frame.f_code.co_name != PASSED_ON[name]:
            return name.startswith(module)
    return False


class Reader:
    """Interface of the weight cache for ``Dequantizer``. This base class caches nothing.

    Importing cache/store.py replaces the global ``reader``, so that the core need not import the weight cache.
    """

    on = False  # ``Dequantizer`` calls ``read`` only while this is True.

    def read(self, weight: PackedWeight, decode: Callable[[PackedWeight], Tensor | Reason]) -> Tensor | Reason | None:
        """Return the cached dense weight, or None if the caller has to decode the weight.

        The caller must not write to the cached weight.
        """

    def forget(self, tensor: Tensor) -> None:
        """Drop the weights decoded from the tensor, and every weak reference to it."""


reader = Reader()


class Prefetch:
    """Interface of the prefetcher of offloaded weights. This base class copies nothing.

    Importing offload/prefetch.py replaces the global ``prefetch``.
    """

    on = False  # ``read`` and ``holds`` are called only while this is True.

    def read(self, weight: PackedWeight, run: Callable[[PackedWeight], Tensor | Reason]) -> Tensor | Reason | None:
        """Return the result of ``run`` with the weight's copy on the GPU, or None if the weight is not in host memory."""

    def holds(self, packed: Tensor) -> bool:
        """Return whether the packed bytes are in host memory."""
        raise NotImplementedError

    def forget(self, tensor: Tensor) -> None:
        """Drop every weak reference to the tensor."""


prefetch = Prefetch()


class Dequantizer:
    """Dequantizes weights for one target (a replaced library function), and counts the target's hits.

    Args:
        target: the target's name.
        readers: the name prefix of modules that only read the result, such as "unsloth.". Only callers in these modules
            may get a cached tensor. With "", callers are not checked, and the argument ``only_read`` alone decides.
    """

    def __init__(self, target: str, readers: str = ""):
        self.target, self.readers = target, readers
        self.fallbacks = Fallbacks(target)
        self.classes: dict[type, bool] = {}  # results of ``returns_tensors``

    def of_state(
        self, packed: Tensor, state: Any, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        """Dequantize a packed weight that has a bitsandbytes QuantState. The other arguments are those of ``run``."""
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
        # While torch.compile traces, the tensor subclass may be FakeTensor, which ``trace`` supports.
        return self.trace(packed, state, out) if torch.compiler.is_compiling() else Reason.TENSOR_SUBCLASS

    def trace(self, packed: Tensor, state: Any, out: Tensor | None = None, *where: bool) -> Tensor | Reason:
        """Dequantize by calling the custom op, while torch.compile traces the caller.

        The op's fake implementation checks the guards.

        Raises:
            ValueError: the weight is in the packing for the CPU (CPU_PACKING). Dynamo then breaks the graph and runs
                the call eagerly, or raises an error.
        """
        fields = fields_of(packed, state)
        if isinstance(fields, Reason):
            if fields is Reason.CPU_PACKING:
                raise ValueError(fields.sentence)
            return fields
        watcher = watched_trace()
        if watcher is not None:
            return watcher
        if out is not None:
            return Reason.OUT_MISMATCH
        if has_gradient(packed):
            return Reason.REQUIRES_GRAD
        # The op's fake implementation checks the device too. This earlier check keeps the op out of graphs for the CPU.
        if not runtime.runs_on(packed):
            return Reason.NOT_CUDA
        return op.dequantize(*fields)

    def run(
        self, weight: PackedWeight, out: Tensor | None = None, into_buffer: bool = False, only_read: bool = False
    ) -> Tensor | Reason:
        """Return the dequantized weight, or the Reason why the kernel cannot run.

        If the weight has not changed since an earlier call, its launch is reused.

        Args:
            out: the tensor to fill. ``out`` is returned, or its transpose if the packed bytes are transposed.
            into_buffer: whether the result may be in the shared buffer, which the next call with ``into_buffer``
                overwrites.
            only_read: whether the caller only reads the result. If so, the result may be a cached tensor.
        """
        watcher = watched()
        if watcher is not None:
            return self.dispatch(weight, out) if watcher is Reason.DISPATCH_MODE else watcher
        if only_read and reader.on and out is None:
            found = reader.read(weight, self.run)
            if found is not None:
                return found
        if prefetch.on:  # a lambda would turn its variables into cells, which would slow down every call
            found = prefetch.read(weight, functools.partial(self.run, out=out, into_buffer=into_buffer))
            if found is not None:
                return found
        launch: Any
        try:
            launch = weight.memo().launch
            counter = launch.counters[self]
        except (AttributeError, KeyError, TypeError, RuntimeError):  # no launch for this target, or an unhashable field
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
        if has_gradient(weight.packed):
            return Reason.REQUIRES_GRAD
        return guards.why_not(weight, out=out)

    def resolve(self, weight: PackedWeight) -> launches.Launch | Reason:
        """Check the guards and build the weight's launch. If the kernel cannot run, return the Reason."""
        reason = self.why_not(weight)
        if reason is not None:
            return reason
        weight = weight._replace(shape=tuple(weight.shape))
        try:
            launch = launches.remembered(weight)
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        counter = counters.of(self.target, tuple(weight.shape), str(weight.dtype))
        # Only parameters count as weights, not copies of packed bytes, such as those of the chosen experts of a stack.
        if isinstance(weight.owner(), torch.nn.Parameter):
            counter.addresses.add(weight.packed.data_ptr())
        launch.counters[self] = counter
        return launch

    def dispatch(self, weight: PackedWeight, out: Tensor | None) -> Tensor | Reason:
        """Dequantize by calling the custom op, so that active dispatch modes see the call. The call is not counted as a hit."""
        reason = self.why_not(weight) if out is None else Reason.OUT_MISMATCH
        return op.dequantize(*weight) if reason is None else reason


def served(readers: str = "") -> Callable[[Function], Callable[[Any, Function], Function]]:
    """Return a decorator that turns an adapter into a factory of replacements for library functions.

    An adapter is a function ``adapter(serve, *arguments)``, where ``arguments`` are those of the library function. The
    adapter returns a Reason, or calls ``serve`` with the arguments of ``Dequantizer.of_state`` and returns the result.
    ``serve`` is ``Dequantizer.of_state`` or, while torch.compile traces, ``Dequantizer.trace``.

    The factory takes a target and the original function. The field ``replace`` of a ``Target`` names the factory.

    Args:
        readers: the argument ``readers`` of ``Dequantizer``.
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
