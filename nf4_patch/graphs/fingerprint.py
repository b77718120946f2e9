"""Detect whether a layer has changed so that its captured graphs are no longer valid."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from ..nf4.runtime import runs_on
from ..patching.context import plain_methods

STANDARD = frozenset(vars(nn.Module()))  # attributes of every module
IMPLEMENTATIONS = "_attn_implementation_internal", "_experts_implementation_internal"  # attributes of configs
# SKIPPED: attributes that are not compared.
# TRL sets a new checkpoint function after each generation. Every call of a layer checks this function anyway.
SKIPPED = STANDARD | {"_gradient_checkpointing_func"}
# HOLDERS: modules of which only the children are compared, unless they have tensors of their own. A layer with peft has many.
HOLDERS = nn.ModuleDict, nn.ModuleList
HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CONTAINERS = (dict, list, set)
CALLED = "forward", "__call__", "_call_impl", "__getattr__"  # methods of every module that run in a call
PLAIN = (bool, int, float, str, type(None))
of_state = itemgetter("absmax", "code", "dtype", "blocksize", "quant_type", "offset", "state2")
quant_state, code_of = attrgetter("quant_state"), attrgetter("__code__")
version_of = attrgetter("_version")
of_tensor, strides = attrgetter("requires_grad", "dtype", "shape"), methodcaller("stride")


def addresses_of(tensors: list[Any]) -> list[int]:
    with plain_methods():
        return [tensor.data_ptr() for tensor in tensors]


def plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(plain, value)))


def may_change(value: Any) -> bool:
    """Return whether a function may read this value from its class or Python module, so that the value is compared."""
    return plain(value) or isinstance(value, property) or (callable(value) and not isinstance(value, type))


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function reads, and the functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def unwrapped(functions: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions, without static and class methods around them, and the functions that their decorators wrapped."""
    for function in functions:
        function = getattr(function, "__func__", function)
        while isinstance(function, FunctionType):
            yield function
            function = getattr(function, "__wrapped__", None)


def nested(values: Any) -> Iterator[Any]:
    """Yield the values, and the items of all lists, tuples, sets and dicts among them."""
    for value in values:
        yield value
        if isinstance(value, (*CONTAINERS, tuple)):
            yield from nested(value.values() if isinstance(value, dict) else value)


def own_names(kind: type) -> set[str]:
    """Return the names that a class and its base classes below ``nn.Module`` define."""
    return {name for each in kind.__mro__ if each not in (nn.Module, object) for name in vars(each)}


def weak(value: Any) -> Callable[[], Any]:
    """Return a weak reference to the value, or a strong one if Python has none for values of its class."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def aliases_of(config: Any) -> dict[str, str]:
    """Return other names of the attributes of a config of transformers."""
    names: dict[str, str] = getattr(type(config), "attribute_map", {})
    return names


class Code:
    """The functions that the modules of a layer run, apart from what these functions call in other Python modules.

    Libraries replace such functions in classes (``LlamaRMSNorm.forward``), in Python modules
    (``modeling_llama.apply_rotary_pos_emb``, ``torch.nn.functional.scaled_dot_product_attention``) and in transformers'
    registries of attention functions.
    """

    def __init__(self, modules: list[nn.Module], configs: list[dict[str, Any]]):
        types = list({type(module) for module in modules})
        classes = list(dict.fromkeys(kind for each in types for kind in each.__mro__))
        classes = [kind for kind in classes if kind.__module__ not in ("builtins", "abc", "torch.nn.modules.module")]
        spaces: list[Any] = [vars(sys.modules[kind.__module__]) for kind in classes if kind.__module__ in sys.modules]
        forwards = [vars(kind)["forward"] for kind in classes if "forward" in vars(kind)]
        spaces += [function.__globals__ for function in unwrapped(forwards)]
        generic: Any = sys.modules.get("transformers.utils.generic")
        interface = getattr(generic, "GeneralInterface", ())
        registries = {id(v): v for space in spaces for v in [*space.values()] if isinstance(v, interface)}.values()
        implementations = {config.get(name) for config in configs for name in IMPLEMENTATIONS}
        used = [registry[name] for registry in registries for name in implementations if name in registry]
        spaces += [getattr(function, "__globals__", {}) for function in used]
        self.registries = [mapping for each in registries for mapping in (each._local_mapping, each._global_mapping)]
        spaces = [*{id(space): space for space in spaces}.values()]
        within = [value for space in [*map(vars, classes), *spaces] for value in [*space.values()]]
        # ``names``: the names that these functions read
        codes = [function.__code__ for function in unwrapped(within)]
        self.names = {*CALLED}.union(*[names_in(code) for code in codes if code.co_name != "__init__"])
        # A method may be added to a class that inherited it, so the names are looked up in the types, not in their base classes.
        # Of the methods that every module has, only CALLED may be added.
        inherited = {name for name in vars(nn.Module) if name not in CALLED}
        of_types = [
            {name: getattr(kind, name) for name in self.names & {*dir(kind)} if hasattr(kind, name)} for kind in types
        ]
        every: list[Any] = [
            (attrgetter, kind, {name: value for name, value in found.items() if name not in inherited or name in own})
            for kind, found, own in zip(types, of_types, map(own_names, types), strict=True)
        ]
        spaces.append(vars(nn.Module))
        every += [(itemgetter, space, {**space}) for space in (*spaces, vars(nn.functional))]
        self.getters, read = list[tuple[Any, Any]](), list[Any]()
        for getter, holder, found in every:
            chosen = {name: value for name, value in found.items() if name in self.names and may_change(value)}
            if chosen:
                self.getters.append((getter(*chosen), holder))
                read += chosen.values()
        self.values, self.functions = self.found_values(), [*dict.fromkeys(unwrapped(read))]
        self.codes = [*map(code_of, self.functions)]

    def found_values(self) -> list[Any]:
        return [get(holder) for get, holder in self.getters]

    def holds(self) -> bool:
        # IPython's autoreload replaces the code in the functions themselves.
        return self.found_values() == self.values and all(map(is_, map(code_of, self.functions), self.codes))


class Fingerprint:
    """A record of a layer at its capture: modules, attributes, parameters, quant_states, hooks, code and addresses.

    ``holds`` and ``is_in_place`` compare the layer with this record. All lists in the record are flat, so that Python
    compares them in C. The record keeps the submodules and tensors alive, but not the layer itself.
    """

    def __init__(self, layer: nn.Module):
        self.layer = weakref.ref(layer)
        modules = list(layer.modules())
        self.modules = modules[1:]
        compared = [m for m in modules if type(m) not in HOLDERS or m._parameters or m._buffers]
        # A callable attribute may be a bound method of the layer. A strong reference to it would keep the layer alive.
        own = {name: value for name, value in vars(layer).items() if callable(value) and name not in SKIPPED}
        self.own = {name: weak(value) for name, value in own.items()}
        names = [[name for name in vars(module) if name not in SKIPPED] for module in compared]
        names[0] = [name for name in names[0] if name not in self.own]
        self.dictionaries = [vars(module) for module in compared]
        # Each getter reads ``training`` and the attributes in ``names`` of one module, all at once. Nothing can call
        # a module without a forward, such as a ModuleDict, so nothing reads its ``training`` or runs its hooks.
        called = [type(module).forward is not nn.Module.forward for module in compared]
        read = [["training", *each] if calls else each for calls, each in zip(called, names, strict=True)]
        self.getters = [(itemgetter(*each), vars(module)) for module, each in zip(compared, read, strict=True) if each]
        self.values, self.sizes = self.found_values(), [*map(len, self.dictionaries)]
        self.compared, self.type = compared[1:], type(layer)
        self.types = [*map(type, self.compared)]
        attributes = chain.from_iterable(vars(module).items() for module in compared)
        within = list(nested(value for name, value in attributes if name not in STANDARD))
        self.containers = [value for value in within if isinstance(value, CONTAINERS)]
        configs = list({id(c): c for m in compared if hasattr(c := vars(m).get("config"), "__dict__")}.values())
        self.configs = [*map(vars, configs)]
        self.code = Code(compared, self.configs)
        used = self.code.names.union(IMPLEMENTATIONS)
        used |= {names[name] for names in map(aliases_of, configs) for name in used & names.keys()}
        chosen = [([name for name in config if name in used], config) for config in self.configs]
        self.of_configs = [(itemgetter(*each), config) for each, config in chosen if each]
        self.containers += [v for each, c in chosen for v in nested(map(c.get, each)) if isinstance(v, CONTAINERS)]
        self.settings = self.found_settings()
        hooks = [each for module in compress(compared, called) for each in HOOKS(module)]
        self.hooks = [each for each in hooks if each]
        children = [module._modules for module in modules]
        of_tensors: list[Any] = [d for module in compared for d in (module._parameters, module._buffers)]
        self.empty = [each for each in [*hooks, *children, *of_tensors, *self.code.registries] if not each]
        self.containers += [each for each in [*hooks, *children, *self.code.registries] if each]
        self.copies = [copy.copy(container) for container in self.containers]
        self.tensor_dictionaries: list[dict[str, Any]] = [each for each in of_tensors if each]
        self.slots: list[Any] = [*chain.from_iterable(map(dict.values, self.tensor_dictionaries))]
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
        # Packed weights have no dtype or shape that could change, but their __torch_function__ makes each access slow.
        self.floating = [tensor for tensor in self.tensors if tensor.dtype.is_floating_point]
        self.layouts = self.found_layouts()
        self.addresses = addresses_of(self.tensors)
        # A kernel gets a number on the host as an argument, which a graph cannot read again.
        self.numbers = [tensor for tensor in self.tensors if tensor.numel() == 1 and tensor.is_cpu]
        self.found_numbers = [tensor.item() for tensor in self.numbers]
        self.on_host = [tensor for tensor in self.tensors if tensor.is_cpu and not runs_on(tensor)]
        self.versions = [*map(version_of, self.on_host)]
        self.scales = list({id(value): value for value in self.of_states if isinstance(value, Tensor)}.values())
        self.addresses_of_scales = addresses_of(self.scales)

    def found_values(self) -> list[Any]:
        return [get(dictionary) for get, dictionary in self.getters]

    def found_settings(self) -> list[Any]:
        return [get(config) for get, config in self.of_configs]

    def found_states(self) -> list[Any]:
        return [*chain.from_iterable(map(of_state, self.dictionaries_of_states))]

    def found_layouts(self) -> list[Any]:
        return [*map(of_tensor, self.floating), *map(strides, self.floating)]

    def is_in_place(self) -> bool:
        """Return whether every tensor of the layer is still at the address that it had at the capture."""
        return addresses_of(self.tensors) == self.addresses

    def holds(self) -> bool:
        """Return whether the layer is unchanged since the capture.

        The addresses of parameters and buffers are not compared, nor the contents of tensors on the GPU.
        """
        layer = self.layer()
        if layer is None or any(self.empty):
            return False
        found = chain.from_iterable(map(dict.values, self.tensor_dictionaries))
        try:
            return (
                self.found_values() == self.values
                and [*map(len, self.dictionaries)] == self.sizes
                and [*map(type, self.compared)] == self.types
                and type(layer) is self.type
                and self.code.holds()
                and all(vars(layer).get(name) is value() for name, value in self.own.items())
                and self.containers == self.copies
                and self.found_settings() == self.settings
                and len(slots := [*found]) == len(self.slots)
                and all(map(is_, slots, self.slots))
                and all(map(is_, map(quant_state, self.packed), self.states))
                and all(map(is_, self.found_states(), self.of_states))
                and self.found_layouts() == self.layouts
                and addresses_of(self.scales) == self.addresses_of_scales
                and [tensor.item() for tensor in self.numbers] == self.found_numbers
                and [*map(version_of, self.on_host)] == self.versions
            )
        except Exception:  # == raises if an attribute now holds a different tensor. A deleted attribute raises too.
            return False

    def restore(self) -> None:
        """Give the layer's lists, dicts and sets back the contents that they had when this fingerprint was made."""
        for container, before in zip(self.containers, self.copies, strict=True):
            if container != before:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)
