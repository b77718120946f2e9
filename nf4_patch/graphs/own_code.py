"""Find the functions that a layer runs, and tell code of installed libraries from code of the script or notebook.

A CUDA graph runs no Python. The fingerprint records the Python state that library code reads. The state that a script's
code reads (globals, closures, other objects) cannot be recorded, so a layer that runs such code is not captured.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib.metadata
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..patching.targets import LIBRARIES, MODULES

CALLED = "forward", "__call__", "_call_impl", "__getattr__"  # methods of every module that run in a call
PLAIN = (bool, int, float, str, type(None))
# FOLDERS: every file below a folder with one of these names counts as library code, also modules that libraries generate.
FOLDERS = {"site-packages", "dist-packages", *(folder for library in LIBRARIES for folder in library.folders)}
VARIABLES = [library.folder_variable for library in LIBRARIES if library.folder_variable]
STANDARD_LIBRARY = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
COUNTING = {"torch.nn.utils.parametrize"}
CHECKPOINT = "_gradient_checkpointing_func"  # the attribute with a layer's checkpoint function, which graphs replace
OURS = __package__.partition(".")[0]


@functools.cache
def roots_of(package: str) -> list[str]:
    """Return the folders of a top-level package, or [] if no distribution, editable or not, installs it."""
    try:
        installed = package == OURS or importlib.metadata.distribution(package) is not None
    except (importlib.metadata.PackageNotFoundError, ValueError):
        installed = package in importlib.metadata.packages_distributions()  # slow, because it reads all distributions
    return [*getattr(sys.modules.get(package), "__path__", ())] if installed else []


@functools.cache
def is_library_file(file: str, package: str) -> bool:
    named = (os.path.basename(os.environ.get(variable, "").rstrip("/")) or ".." for variable in VARIABLES)
    folders = {*FOLDERS, *named}
    for path in (Path(file), Path(os.path.realpath(file))):
        if folders & {*path.parts[:-1]} or any(path.is_relative_to(root) for root in STANDARD_LIBRARY):
            return True
    within = [Path(os.path.realpath(root)) for root in roots_of(package)]
    return any(Path(os.path.realpath(file)).is_relative_to(root) for root in within)


def is_library(function: FunctionType) -> bool:
    """Return whether a function is library code. Generated code counts as code of the module whose globals it reads."""
    space, file = function.__globals__, function.__code__.co_filename
    file = space.get("__file__") or "" if file.startswith("<") else file
    return bool(file) and is_library_file(file, str(space.get("__name__", "")).partition(".")[0])


def is_function(value: Any) -> bool:
    return isinstance(value, (FunctionType, staticmethod, classmethod))


def is_of_library(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ in sys.builtin_module_names or (
        file is not None and is_library_file(file, kind.__module__.partition(".")[0])
    )


def cells_of(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            found.append(cell.cell_contents)
    return found


def functions_in(value: Any, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Yield the functions that a call of ``value`` may run.

    They may be in methods, partials, closures, decorated functions and objects with ``__call__``.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (*PLAIN, Tensor, nn.Module, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, type):
        # A class, such as an autograd function. Library classes are left out, because a script rarely replaces their methods.
        inner: Iterable[Any] = [] if is_of_library(value) else [*filter(is_function, vars(value).values())]
    elif isinstance(value, FunctionType):
        yield value
        inner = [v for v in cells_of(value) if callable(v) and not isinstance(v, type)]
    elif isinstance(value, property):
        inner = [value.fget]
    elif isinstance(value, (staticmethod, classmethod, MethodType)):
        inner = [value.__func__]
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        inner = [value.func, *filter(callable, (*value.args, *value.keywords.values()))]
    else:
        inner = [type(value).__call__] if callable(value) else []
    for each in (*inner, getattr(value, "__wrapped__", None)):
        yield from functions_in(each, seen)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of all globals and attributes that a function and its inner functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


class Code:
    """The functions that a layer may run.

    The search starts with the modules' callable attributes and with their methods in CALLED, such as ``forward``. It
    looks up all names that each found function uses.

    Names are looked up in the classes of the layer's modules, in the Python modules of these classes and of the
    attention and experts functions that a config names, and in ``torch.nn.functional``. They are also looked up in each
    module that another library's module holds under one of the names, such as ``bitsandbytes``.
    """

    def __init__(self, modules: list[nn.Module], configs: list[dict[str, Any]]):
        kinds = dict.fromkeys(kind for each in {*map(type, modules)} for kind in each.__mro__)
        classes = [kind for kind in kinds if kind.__module__ not in ("builtins", "abc")]
        for kind in classes:
            copyreg._slotnames(kind)  # type: ignore[attr-defined]  # otherwise deepcopy or pickle would add this to a class later
        named = [vars(sys.modules[k.__module__]) for k in classes if k.__module__ in sys.modules and k is not nn.Module]
        forwards = [vars(kind)["forward"] for kind in classes if "forward" in vars(kind) and kind is not nn.Module]
        attributes = [
            value for m in modules for name, value in vars(m).items() if name != CHECKPOINT and callable(value)
        ]
        attributes = [value for value in attributes if not isinstance(value, (type, nn.Module))]
        called = [f for value in (*forwards, *attributes) for f in functions_in(value)]
        spaces = [*named, *[f.__globals__ for f in called if is_library(f)], vars(nn.functional)]
        generic: Any = sys.modules.get(MODULES["registries of functions"])
        interface = getattr(generic, "GeneralInterface", ())
        registries = {id(v): v for space in spaces for v in [*space.values()] if isinstance(v, interface)}.values()
        used = {config.get(name) for config in configs for name in IMPLEMENTATIONS}
        registered = [registry[name] for registry in registries for name in used if name in registry]
        called += [f for value in registered for f in functions_in(value)]
        spaces += [f.__globals__ for f in called if is_library(f)]
        self.registries = [mapping for each in registries for mapping in (each._local_mapping, each._global_mapping)]
        self.classes: list[Any] = [*map(vars, classes)]
        distinct = {id(space): space for space in spaces}.values()
        for space in distinct:
            space.setdefault("__warningregistry__", {})  # otherwise a module's first warning would add this later
        # PyTorch's parametrize counts in its globals how often its cache was opened.
        self.spaces: list[Any] = [*self.classes, *[s for s in distinct if s.get("__name__") not in COUNTING]]
        self.bindings: list[tuple[dict[str, Any], str, Any]] = []  # callables that were found in other namespaces
        functions = self.reached(called)
        self.foreign = foreign(functions, attributes, {*map(id, configs)})
        self.codes = [function.__code__ for function in functions]
        replaceable = [f for f in functions if not is_fixed(f.__globals__.get("__name__", ""))]
        self.plain = [f for f in replaceable if not f.__closure__]
        # A closure may hold the layer, as the one that TRL puts in place of a model's forward. A strong reference to it would keep
        # the layer alive.
        self.closures = [weakref.ref(f) for f in replaceable if f.__closure__]

    @property
    def replaceable(self) -> list[Any]:
        """The functions whose code or defaults a script or IPython's autoreload might replace.

        A freed function appears as None.
        """
        return [*self.plain, *[function() for function in self.closures]]

    def reached(self, called: list[FunctionType]) -> list[FunctionType]:
        functions, names = dict.fromkeys(called), {*CALLED}
        pending = [*CALLED, *[name for function in called for name in names_in(function.__code__)]]
        names.update(pending)
        holders, looked_up, compared = [*self.spaces], list[str](), {*map(id, self.spaces)}
        searched = {id(None)} | compared  # ids of namespaces, and of the values that were found in them

        def search(holder: Any, name: str) -> None:
            value = holder.get(name)
            if callable(value) and id(holder) not in compared:
                self.bindings.append((holder, name, value))
            if id(value) in searched:
                return
            if isinstance(value, ModuleType) and is_fixed(holder.get("__name__", "")):
                return  # what only PyTorch imports, such as sympy, is not run by layers
            searched.add(id(value))
            # A function may be called as an attribute of its Python module, for example bitsandbytes.matmul_4bit.
            if isinstance(value, ModuleType):
                inner = vars(value)
                if id(inner) not in searched and not is_fixed(value.__name__):
                    searched.add(id(inner))
                    holders.append(inner)
                    for each in looked_up:
                        search(inner, each)
                return
            for function in functions_in(value):
                if function not in functions:
                    functions[function] = None
                    new = {*names_in(function.__code__)} - names
                    names.update(new)
                    pending.extend(new)

        while pending:
            looked_up.append(name := pending.pop())
            for holder in [*holders]:
                search(holder, name)
        return [*functions]

    def names(self, name: str) -> bool:
        """Return whether the layer's code contains ``name`` as a variable, an attribute or a string."""
        return any(name in all_names(code) for code in self.codes)


IMPLEMENTATIONS = "_attn_implementation_internal", "_experts_implementation_internal"  # attributes of configs


def is_fixed(module: str) -> bool:
    """Return whether the module belongs to PyTorch, NumPy, nf4_patch or the standard library, which no script changes."""
    package = module.partition(".")[0]
    return package in ("torch", "numpy", OURS) or package in sys.stdlib_module_names


def held_by(value: Any) -> Iterator[Any]:
    """Yield the values that a partial or closure captured, and the values that these captured in turn."""
    seen, waiting = {id(value)}, [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, functools.partial):
            held = [*current.args, *current.keywords.values(), current.func]
        elif isinstance(current, MethodType):
            held = [current.__func__]
        else:
            held = cells_of(current) if isinstance(current, FunctionType) else []
        for each in held:
            if id(each) not in seen:  # a closure may hold itself
                seen.add(id(each))
                waiting.append(each)
                yield each


def is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return isinstance(value, (*PLAIN, Tensor, nn.Module, type, ModuleType)) or callable(value)


def foreign(functions: list[FunctionType], attributes: list[Any], watched: set[int]) -> str:
    """Return why graphs of a layer would ignore changes of Python state, or "".

    The cause is a function of the user's script, or an object in a callable attribute whose ``__dict__`` is not in
    ``watched``, the ids of dicts that the fingerprint compares.
    """
    for function in functions:
        if not is_library(function):
            return f"it runs {function.__module__}.{function.__qualname__}, which is not code of an installed library"
    for value in attributes:
        for held in held_by(value):
            if not is_constant(held) and id(getattr(held, "__dict__", None)) not in watched:
                return f"a function that it runs holds an object of the class {type(held).__name__}, which may change"
    return ""


def all_names(code: CodeType) -> Iterator[Any]:
    yield from (*code.co_names, *code.co_varnames, *code.co_consts)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_names(constant)


HOOKING = {"register_hook", "register_prehook", "retain_grad"}


@contextlib.contextmanager
def hooks_on_activations() -> Iterator[list[str]]:
    """Yield a list of the names of all calls in the ``with`` block that put a hook on a tensor or an autograd node.

    Autograd cannot list its hooks, so Python's profiler observes the calls.
    """
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            name = argument.__name__
        elif event == "call":
            name = frame.f_code.co_name
        else:
            return
        if name in HOOKING:
            found.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
