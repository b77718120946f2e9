"""Detect whether a layer has changed so that its captured graphs are no longer valid."""

from __future__ import annotations

import weakref
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn

from ..patching.context import plain_methods

STANDARD = frozenset(vars(nn.Module()))  # attributes of every module
# SKIPPED: attributes that are not compared.
# TRL sets a new checkpoint function after each generation. Every call of a layer checks this function anyway.
SKIPPED = STANDARD | {"_gradient_checkpointing_func"}
HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTAINERS = (dict, list, set)
NESTED = attrgetter("absmax", "code", "offset", "state2", "state2.absmax", "state2.code")
FLAT = attrgetter("absmax", "code")
quant_state = attrgetter("quant_state")
of_tensor, strides = attrgetter("requires_grad", "dtype", "shape"), methodcaller("stride")


def addresses_of(tensors: list[Any]) -> list[int]:
    with plain_methods():
        return [tensor.data_ptr() for tensor in tensors]


class Fingerprint:
    """A record of a layer at its capture: modules, attributes, parameters, quant_states, hooks and addresses.

    ``holds`` and ``is_in_place`` compare the layer with this record. All lists in the record are flat, so that Python
    compares them in C. The record keeps the submodules and tensors alive, but not the layer itself.
    """

    def __init__(self, layer: nn.Module):
        self.layer = weakref.ref(layer)
        everything = list(layer.modules())
        self.modules = everything[1:]
        # A callable attribute may be a bound method of the layer. A strong reference to it would keep the layer alive.
        own = {name: value for name, value in vars(layer).items() if callable(value) and name not in SKIPPED}
        self.own = {name: weakref.ref(value) for name, value in own.items()}
        names = [[name for name in vars(module) if name not in SKIPPED] for module in everything]
        names[0] = [name for name in names[0] if name not in self.own]
        self.dictionaries = [vars(module) for module in everything]
        # Each getter reads ``training`` and the attributes in ``names`` of one module, all at once. Nothing can call
        # a module without a forward, such as a ModuleDict, so nothing reads its ``training`` or runs its hooks.
        called = [type(module).forward is not nn.Module.forward for module in everything]
        read = [["training", *each] if calls else each for calls, each in zip(called, names, strict=True)]
        self.getters = [
            (itemgetter(*each), vars(module)) for module, each in zip(everything, read, strict=True) if each
        ]
        self.values, self.sizes = self.found_values(), [*map(len, self.dictionaries)]
        self.types = [*map(type, self.modules)]
        attributes = [vars(module).items() for module in everything]
        self.containers = [
            value
            for name, value in chain.from_iterable(attributes)
            if name not in STANDARD and isinstance(value, CONTAINERS)
        ]
        self.configs = list(
            {id(c): vars(c) for m in everything if hasattr(c := vars(m).get("config"), "__dict__")}.values()
        )
        self.implementations = self.found_implementations()
        hooks = [each for module in compress(everything, called) for each in HOOKS(module)]
        self.hooks = [each for each in hooks if each]
        children = [module._modules for module in everything]
        of_tensors: list[Any] = [d for module in everything for d in (module._parameters, module._buffers)]
        self.empty = [each for each in [*hooks, *children, *of_tensors] if not each]
        self.containers += [each for each in [*hooks, *children] if each]
        self.copies = [type(container)(container) for container in self.containers]
        self.tensor_dictionaries: list[dict[str, Any]] = [each for each in of_tensors if each]
        self.slots: list[Any] = [*chain.from_iterable(map(dict.values, self.tensor_dictionaries))]
        self.tensors: list[Any] = [tensor for tensor in self.slots if tensor is not None]
        # The QuantState of a linear layer is an attribute of the packed parameter.
        # The QuantState of packed experts is an attribute of a parametrization, which is a module.
        holders = [*self.tensors, *everything]
        self.packed = [holder for holder in holders if hasattr(getattr(holder, "quant_state", None), "nested")]
        self.states = [*map(quant_state, self.packed)]
        self.fields = [NESTED if state.nested else FLAT for state in self.states]
        self.of_states = self.found_states()
        # Packed weights have no dtype or shape that could change, but their __torch_function__ makes each access slow.
        self.floating = [tensor for tensor in self.tensors if tensor.dtype.is_floating_point]
        self.layouts = self.found_layouts()
        self.addresses = addresses_of(self.tensors)
        of_states = chain.from_iterable(self.of_states)
        self.scales = list({id(value): value for value in of_states if isinstance(value, Tensor)}.values())
        self.addresses_of_scales = addresses_of(self.scales)

    def found_values(self) -> list[Any]:
        return [get(dictionary) for get, dictionary in self.getters]

    def found_implementations(self) -> list[Any]:
        names = "_attn_implementation_internal", "_experts_implementation_internal"
        return [config.get(name) for config in self.configs for name in names]

    def found_states(self) -> list[tuple[Any, ...]]:
        return [fields(state) for fields, state in zip(self.fields, self.states, strict=True)]

    def found_layouts(self) -> list[Any]:
        return [*map(of_tensor, self.floating), *map(strides, self.floating)]

    def is_in_place(self) -> bool:
        """Return whether every parameter and buffer is still at the address that it had at the capture."""
        return addresses_of(self.tensors) == self.addresses

    def holds(self) -> bool:
        """Return whether the layer is unchanged since the capture.

        The addresses of parameters and buffers, and the contents of tensors, are not compared.
        """
        layer = self.layer()
        if layer is None or any(self.empty):
            return False
        found = chain.from_iterable(map(dict.values, self.tensor_dictionaries))
        try:
            return (
                self.found_values() == self.values
                and [*map(len, self.dictionaries)] == self.sizes
                and [*map(type, self.modules)] == self.types
                and all(vars(layer).get(name) is value() for name, value in self.own.items())
                and self.containers == self.copies
                and self.found_implementations() == self.implementations
                and len(slots := [*found]) == len(self.slots)
                and all(map(is_, slots, self.slots))
                and all(map(is_, map(quant_state, self.packed), self.states))
                and all(map(is_, chain.from_iterable(self.found_states()), chain.from_iterable(self.of_states)))
                and self.found_layouts() == self.layouts
                and addresses_of(self.scales) == self.addresses_of_scales
            )
        except Exception:  # == raises if an attribute now holds a different tensor. A deleted attribute raises too.
            return False

    def restore(self) -> None:
        """Give the layer's lists, dicts and sets back the contents that they had when this fingerprint was made."""
        for container, copy in zip(self.containers, self.copies, strict=True):
            if container != copy:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(copy)
