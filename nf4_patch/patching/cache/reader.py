"""Who may be handed a cached weight: callers that only read what they dequantize."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..context import is_compiling, keep_dynamo_out, modes_active, own_dispatch, transforms_active
from ..quant_state import Fields, fields_of
from ..reasons import Reason, Uncached
from ..replacement import Fallbacks
from ..switch import switch
from ..targets import Reads, Target
from .cache import cache
from .entry import SCALES


class Inside(threading.local):
    """By library: "forward" or "backward" where the thread is inside such a function."""

    bitsandbytes = unsloth = transformers = ""


inside = Inside()


def replace_reader(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For the ``forward`` or ``backward`` of an autograd function, which reaches for the library's public dequantization."""
    library, direction = target.library, target.name.rpartition(".")[2]

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        # no gate in the closure: PyTorch 2.8's Dynamo breaks the graph at a function whose closure holds an object
        if is_compiling() or not cache.on:
            return original(*args, **kwargs)
        if cache.auto is not None and direction == "forward" and len(args) > 1:
            cache.auto.observe(args[1])  # A, of (ctx, A, B, ...)
        before = getattr(inside, library)
        setattr(inside, library, direction)
        try:
            return original(*args, **kwargs)
        finally:
            setattr(inside, library, before)

    return read


def swap_tensors(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.utils.swap_tensors``, which refuses a tensor with weak references: the cache lets go of both first."""

    fallbacks = Fallbacks(target.name)

    @functools.wraps(original)
    def replacement(t1: Tensor, t2: Tensor) -> None:
        if cache.on:
            for tensor in (t1, t2):
                fallbacks.attempt(cache.forget, tensor)
        original(t1, t2)

    return replacement


class Reader:
    """The cached weights of one target, for the calls of it that only read what they dequantize."""

    def __init__(self, target: Target, decode: Callable[..., Tensor | Reason]):
        """
        Args:
            target: the row, which says which calls those are.
            decode: ``run_fields`` of the target's Dequantizer.
        """
        self.library, self.always, self.decode = target.library, target.reads is Reads.ALWAYS, decode

    def state(
        self, weight: Tensor, state: Any, shared: bool = False, backward: bool | None = None
    ) -> Tensor | Reason | None:
        """The cached weight of a QuantState, or one that is cached from now on; a Reason is possible too.

        Args:
            shared: the next such call may overwrite the result: whoever asks for that only reads it.
            backward: this backward pass is not expected to read the weight again; None: inside a ``backward`` of the library.

        Returns:
            None where the weight has to be decoded as without the cache.
        """
        direction = getattr(inside, self.library)
        if not (direction or shared or self.always):
            return None
        fields = fields_of(state)
        if type(fields) is Reason:
            return None
        if backward is None:
            backward = direction == "backward"
        if type(weight) is Tensor:
            return self.fields(weight, fields, state.quant_type, state, backward)
        if getattr(type(weight), "__torch_dispatch__", None) is not own_dispatch:
            return None
        with torch._C.DisableTorchFunctionSubclass():  # Params4bit's methods as a Tensor's
            return self.fields(weight, fields, state.quant_type, state, backward)

    def fields(
        self, weight: Tensor, fields: Fields, quant_type: Any, state: Any = None, backward: bool = False
    ) -> Tensor | Reason | None:
        """As ``state``, of the fields of a Layout after ``weight``; the code is not read."""
        if modes_active() or transforms_active() is not None:
            return None
        try:
            found = cache.find(weight, fields, quant_type, backward)
            if found is None:
                decode = functools.partial(self.decode, weight, fields, quant_type, state)
                return cache.insert(weight, fields, quant_type, decode, backward)
        except (AttributeError, RuntimeError):
            tensors = [weight, *(fields[i] for i in SCALES if fields[i] is not None)]
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                return None  # the guards say which
            if not any(tensor.is_inference() for tensor in tensors):
                raise
            cache.refuse(Uncached.INFERENCE_TENSOR)
            return None
        if switch.strict:
            decoded = self.decode(weight, fields, quant_type, state)
            if type(decoded) is Reason:
                return decoded
            cache.compare(found, decoded)
        return found


for method in (Reader.state, Reader.fields):
    keep_dynamo_out(method)
