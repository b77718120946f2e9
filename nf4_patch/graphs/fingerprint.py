"""Detect changes of a layer that make its captured graphs invalid."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..nf4.runtime import runs_on
from ..patching.context import plain_methods
from .own_code import Code

STANDARD = frozenset(vars(nn.Module()))  # attributes of every module
# SKIPPED: attributes that no replay depends on. TRL sets a new checkpoint function after each generation, and every call of a
# layer checks it anyway. ``generate()`` and ``enable_input_require_grads()`` set the others.
CHECKPOINT = "_gradient_checkpointing_func"
SKIPPED = frozenset({
    CHECKPOINT, "generation_config", "_previous_max_cache_length", "_compiled_call", "_last_compile_config", "_require_grads_hook",
    "_require_grads_hooks",
})  # fmt: skip
# HOLDERS: containers whose children alone are compared, unless they hold tensors themselves. A layer with peft has many.
HOLDERS = nn.ModuleDict, nn.ModuleList
HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTAINERS = (dict, list, set)
of_state = itemgetter("absmax", "shape", "code", "dtype", "blocksize", "quant_type", "offset", "state2")
quant_state, code_of = attrgetter("quant_state"), attrgetter("__code__")
version_of, defaults_of = attrgetter("_version"), attrgetter("__defaults__", "__kwdefaults__")
of_tensor, strides = attrgetter("requires_grad", "dtype", "shape"), methodcaller("stride")


def addresses_of(tensors: list[Any]) -> list[int]:
    with plain_methods():
        return [tensor.data_ptr() for tensor in tensors]


def versions_of(tensors: list[Any]) -> list[int]:
    with plain_methods():
        return [*map(version_of, tensors)]


def nested(values: Any) -> Iterator[Any]:
    """Yield the values, and recursively the items of all containers among them."""
    for value in values:
        yield value
        if isinstance(value, (*CONTAINERS, tuple)):
            yield from nested(value.values() if isinstance(value, dict) else value)


def only_requires_gradient(hook: Any) -> bool:
    """Return whether the hook only calls ``requires_grad_``, as transformers' hook for gradient checkpointing does."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_names == ("requires_grad_",)


def weak(value: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one if the value's class allows no weak one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def copy_of(namespace: Any) -> Any:
    return {**namespace} if isinstance(namespace, MappingProxyType) else copy.copy(namespace)


class Fingerprint:
    """A record of a layer at its capture: modules, attributes, parameters, quant_states, hooks, code and addresses.

    Whole dicts are compared with ``==``, which is fast. The record keeps the submodules and tensors alive, but not the
    layer.
    """

    def __init__(self, layer: nn.Module):
        self.layer = weakref.ref(layer)
        modules = list(layer.modules())
        self.modules = modules[1:]
        compared = [m for m in modules if type(m) not in HOLDERS or m._parameters or m._buffers]
        self.compared = compared[1:]
        # A callable attribute may be a bound method of the layer. A strong reference to it would keep the layer alive.
        self.own = {n: weak(v) for n, v in vars(layer).items() if callable(v) and n not in SKIPPED}
        self.skipped = SKIPPED.union(self.own)
        self.of_layer = self.attributes_of(layer)
        self.checkpointed = [
            m for m in self.compared if CHECKPOINT in vars(m)
        ]  # the decoder layers, if ``layer`` is a whole model
        self.of_checkpointed = [*map(self.attributes_of, self.checkpointed)]
        self.types = [*map(type, compared)]
        attributes = chain.from_iterable(vars(module).items() for module in compared)
        within = list(nested(value for name, value in attributes if name not in STANDARD))
        configs = list({id(c): c for m in compared if hasattr(c := vars(m).get("config"), "__dict__")}.values())
        self.code = Code(compared, [*map(vars, configs)])
        # Nothing can call a module without a forward, such as a ModuleDict, so nothing runs its hooks.
        called = [type(module).forward is not nn.Module.forward for module in compared]
        hooks = [each for module in compress(compared, called) for each in HOOKS(module)]
        self.hooks = [each for each in hooks if each]
        self.requiring = [each for each in hooks if any(map(only_requires_gradient, each.values()))]
        self.hooks_besides = self.found_hooks_besides()
        known = {*map(id, self.requiring)}
        hooks = [each for each in hooks if id(each) not in known]
        children = [module._modules for module in modules]
        of_tensors: list[Any] = [d for module in compared for d in (module._parameters, module._buffers)]
        containers = [value for value in within if isinstance(value, CONTAINERS)]
        of_configs = [v for each in configs for v in nested(vars(each).values()) if isinstance(v, CONTAINERS)]
        of_classes = [v for space in self.code.classes for v in space.values() if isinstance(v, CONTAINERS)]
        of_functions = [f.__kwdefaults__ for f in self.code.replaceable if f.__kwdefaults__]
        self.changing: list[Any] = [*containers, *hooks, *children]  # a call of the layer might change these
        every = [
            *self.changing, *self.code.registries, *of_configs, *of_classes, *of_functions,
            *map(vars, [*[m for m in self.compared if CHECKPOINT not in vars(m)], *configs]), *self.code.spaces,
        ]  # fmt: skip
        every = [*{id(each): each for each in every}.values()]
        self.watched = [each for each in every if each]
        self.empty = [each for each in [*every, *of_tensors] if not each]
        self.copies = [copy_of(each) for each in self.watched]
        # == ignores the order of a dict's items, but an nn.Sequential calls its children in this order.
        self.children = [each for each in children if len(each) > 1]
        self.order = [*chain.from_iterable(self.children)]
        functions = self.code.replaceable
        self.codes, self.defaults = [*map(code_of, functions)], [*chain.from_iterable(map(defaults_of, functions))]
        self.tensor_dictionaries: list[dict[str, Any]] = [each for each in of_tensors if each]
        self.slots: list[Any] = [*chain.from_iterable(map(dict.values, self.tensor_dictionaries))]
        # Tensors in attributes are compared by identity, because == is true for two one-element tensors of equal value.
        dictionaries = [*map(vars, compared), *[each for each in containers if isinstance(each, dict)]]
        items: list[Any] = [(each, each.items()) for each in dictionaries]
        items += [(each, enumerate(each)) for each in containers if isinstance(each, list)]
        self.held = [(holder, key, t) for holder, found in items for key, t in found if isinstance(t, Tensor)]
        others = [value for value in within if isinstance(value, Tensor)]
        self.tensors: list[Any] = [*filter(lambda tensor: tensor is not None, self.slots), *others]
        # The QuantState of a linear layer is an attribute of the packed parameter.
        # The QuantState of packed experts is an attribute of a parametrization, which is a module.
        holders = [*self.tensors, *compared]
        self.packed = [holder for holder in holders if hasattr(getattr(holder, "quant_state", None), "nested")]
        self.states = [*map(quant_state, self.packed)]
        distinct = {id(state): state for state in self.states}.values()  # the module and its weight may share one
        every = [*distinct, *[state.state2 for state in distinct if state.nested]]
        self.dictionaries_of_states = [vars(state) for state in every]
        self.of_states = self.found_states()
        # Packed weights are left out: their dtype and shape do not change, and their __torch_function__ is slow.
        self.floating = [tensor for tensor in self.tensors if tensor.dtype.is_floating_point]
        self.layouts = self.found_layouts()
        self.addresses = addresses_of(self.tensors)
        # A kernel gets the number in a CPU tensor as an argument. A graph repeats this number and does not read it again.
        self.numbers = [tensor for tensor in self.tensors if tensor.numel() == 1 and tensor.is_cpu]
        self.found_numbers = [tensor.item() for tensor in self.numbers]
        self.on_host = [tensor for tensor in self.tensors if tensor.is_cpu and not runs_on(tensor)]
        self.versions = versions_of(self.on_host)
        self.scales = list({id(value): value for value in self.of_states if isinstance(value, Tensor)}.values())
        self.addresses_of_scales = addresses_of(self.scales)

    def attributes_of(self, layer: nn.Module) -> dict[str, Any]:
        """Return the layer's attributes that ``holds`` compares with ``==``."""
        # ``holds`` compares the attributes in ``own`` by identity.
        return {name: value for name, value in vars(layer).items() if name not in self.skipped}

    def found_hooks_besides(self) -> list[Any]:
        return [hook for each in self.requiring for hook in each.values() if not only_requires_gradient(hook)]

    def found_states(self) -> list[Any]:
        return [*chain.from_iterable(map(of_state, self.dictionaries_of_states))]

    def found_layouts(self) -> list[Any]:
        return [*map(of_tensor, self.floating), *map(strides, self.floating)]

    def is_in_place(self) -> bool:
        """Return whether every tensor of the layer is still at the address that it had at the capture."""
        return addresses_of(self.tensors) == self.addresses

    def is_outdated(self) -> bool:
        """Return whether this record keeps a module, parameter or buffer alive that the layer no longer has."""
        layer: Any = self.layer()
        now = [] if layer is None else [*layer.modules()]
        tensors = chain.from_iterable(map(dict.values, chain.from_iterable((m._parameters, m._buffers) for m in now)))
        return not {*map(id, self.modules), *map(id, self.slots)} <= {*map(id, now), *map(id, tensors), id(None)}

    def holds(self) -> bool:
        """Return whether the layer is unchanged since the capture.

        Addresses, and contents of tensors on the GPU, are not compared.
        """
        layer = self.layer()
        if layer is None or any(self.empty):
            return False
        found, functions = chain.from_iterable(map(dict.values, self.tensor_dictionaries)), self.code.replaceable
        try:
            return (
                self.watched == self.copies
                and self.attributes_of(layer) == self.of_layer
                and (not self.checkpointed or [*map(self.attributes_of, self.checkpointed)] == self.of_checkpointed)
                and [type(layer), *map(type, self.compared)] == self.types
                and [*chain.from_iterable(self.children)] == self.order
                and (not self.requiring or self.found_hooks_besides() == self.hooks_besides)
                and all(map(is_, map(code_of, functions), self.codes))
                and all(map(is_, chain.from_iterable(map(defaults_of, functions)), self.defaults))
                and all(space.get(name) is value for space, name, value in self.code.bindings)
                and all(vars(layer).get(name) is value() for name, value in self.own.items())
                and all(holder[key] is tensor for holder, key, tensor in self.held)
                and len(slots := [*found]) == len(self.slots)
                and all(map(is_, slots, self.slots))
                and all(map(is_, map(quant_state, self.packed), self.states))
                and all(map(is_, self.found_states(), self.of_states))
                and self.found_layouts() == self.layouts
                and addresses_of(self.scales) == self.addresses_of_scales
                and [tensor.item() for tensor in self.numbers] == self.found_numbers
                and versions_of(self.on_host) == self.versions
            )
        except Exception:  # == raises if an attribute now holds a different tensor. A deleted attribute raises too.
            return False

    def restore(self) -> None:
        """Restore the contents of the layer's lists, dicts and sets, as this fingerprint recorded them."""
        before = {id(each): found for each, found in zip(self.watched, self.copies, strict=True)}
        for container in self.changing:
            found = before.get(id(container), type(container)())
            if container != found:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(found)
