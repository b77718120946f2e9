"""Changes of a 4-bit weight in one table, which the tests of all code that remembers a weight use.

A change is made on ``at``, a Place. It holds the packed parameter ``at.packed`` and its state ``at.state``, and lets a
change replace both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from oracle import quantized


def weight(shape=(64, 96), nested: bool = True, device: Any = "cpu", dtype=torch.bfloat16, seed=0) -> SimpleNamespace:
    """Return a new weight that no other code holds."""
    packed, state = quantized(shape, dtype, device, nested=nested, seed=seed)
    return SimpleNamespace(packed=torch.nn.Parameter(packed, requires_grad=False), state=state)


class Place:
    """The place of a layer's weight, on which a change is made."""

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer

    packed = property(lambda self: self.layer.weight, lambda self, packed: setattr(self.layer, "weight", packed))
    state = property(
        lambda self: self.packed.quant_state, lambda self, state: setattr(self.packed, "quant_state", state)
    )


def layer_with(packed: torch.nn.Parameter, state: Any) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight, packed.quant_state = packed, state
    return layer


def flipped(packed: torch.Tensor) -> torch.Tensor:
    return packed.detach().clone().bitwise_xor_(255)


def another(parameter: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    made = torch.Tensor._make_subclass(type(parameter), content, False)
    vars(made).update(vars(parameter))
    return made


def other(scales: torch.Tensor) -> torch.Tensor:
    """Return other numbers of the same kind."""
    scales = scales.detach()
    return scales ^ 3 if scales.dtype is torch.uint8 else scales * 2


def refill(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Free a tensor's memory and fill it again, as FSDP does. Neither the address nor the version need to change."""
    nbytes = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)  # FSDP2's way, then FSDP1's
    tensor.data._typed_storage()._resize_(nbytes)
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.copy_(content)


def through_an_alias(holder: Any, name: str) -> None:
    """Let the state hold an alias with a separate version counter. The tensor that is written stays alive."""
    first = getattr(holder, name)
    setattr(holder, name, first.data)
    getattr(holder, name).first = first.copy_(other(first))


BYTES: dict[str, Callable[[Any], Any]] = {
    "bytes in place": lambda at: at.packed.bitwise_xor_(255),
    "bytes through a view": lambda at: at.packed.view(-1)[5:].bitwise_xor_(255),
    "bytes through detach()": lambda at: at.packed.detach().bitwise_xor_(255),
    "bytes copied": lambda at: at.packed.copy_(flipped(at.packed)),
    "bytes by out=": lambda at: torch.bitwise_xor(at.packed.clone(), 255, out=at.packed),
    "bytes.data =": lambda at: setattr(at.packed, "data", flipped(at.packed)),
    "bytes.data = other memory at the address": lambda at: setattr(
        at.packed, "data", torch.from_dlpack(at.packed.detach()).bitwise_xor_(255)
    ),
    "bytes by set_": lambda at: at.packed.set_(flipped(at.packed)),
    "bytes in place, and another parameter of theirs": lambda at: setattr(
        at, "packed", another(at.packed, at.packed.bitwise_xor_(255).data)
    ),
    "bytes refilled": lambda at: refill(at.packed, flipped(at.packed)),
    "another parameter": lambda at: setattr(at, "packed", another(at.packed, flipped(at.packed))),
}
SCALES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "absmax": lambda state: (state, "absmax"),
    "second absmax": lambda state: (state.state2, "absmax"),
    "second code": lambda state: (state.state2, "code"),
    "offset": lambda state: (state, "offset"),
}
WAYS: dict[str, Callable[[Any, str], Any]] = {
    "in place": lambda holder, name: getattr(holder, name).copy_(other(getattr(holder, name))),
    "replaced": lambda holder, name: setattr(holder, name, other(getattr(holder, name))),
    ".data =": lambda holder, name: setattr(getattr(holder, name), "data", other(getattr(holder, name))),
    "refilled": lambda holder, name: refill(getattr(holder, name), other(getattr(holder, name))),
    "through an alias": through_an_alias,
}


def of_scales(name: str, way: str) -> Callable[[Any], Any]:
    return lambda at: WAYS[way](*SCALES[name](at.state))


def another_state(at: Any) -> None:
    at.state = copy.copy(at.state)
    at.state.absmax = other(at.state.absmax)


def longer_blocks(at: Any) -> None:
    at.state.blocksize *= 2
    at.state.absmax = at.state.absmax[::2].contiguous()


STATES: dict[str, Callable[[Any], Any]] = {
    "another state": another_state,
    "quant_type": lambda at: setattr(at.state, "quant_type", "fp4"),
    "dtype": lambda at: setattr(at.state, "dtype", torch.float16),
    "shape": lambda at: setattr(at.state, "shape", torch.Size(tuple(at.state.shape)[::-1])),
    "blocksize": longer_blocks,
}
OF_SCALES = {f"{name} {way}": of_scales(name, way) for name, way in itertools.product(SCALES, WAYS)}
CHANGES = BYTES | OF_SCALES | STATES
NUMBERS = BYTES | OF_SCALES | {"another state": another_state}  # what a layer with such a weight can follow
# What autograd saved has other numbers then, and no new version.
UNSEEN = [name for name in CHANGES if "refilled" in name or "at the address" in name]
# Of a weight that is not nested there is one level of scales.
FLAT = {name: change for name, change in CHANGES.items() if not name.startswith((*list(SCALES)[1:],))}
EVERY = [(nested, name) for nested, table in ((True, CHANGES), (False, FLAT)) for name in table]
