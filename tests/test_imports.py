"""One floor, one knowledge, one direction of imports: no folder imports one that stands above it."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import nf4_patch
from nf4_patch.options import OPTIONS
from nf4_patch.patching.config import VARIABLES
from nf4_patch.patching.targets import TARGETS
from nf4_patch.snapshot import Status

ROOT = Path(nf4_patch.__file__).parent
FLOORS = {
    "nf4": 0,
    "patching": 1,
    "cache": 2,
    "offload": 3,
    "lora": 3,
    "matmul": 3,
    "moe": 4,
    "adapters": 5,
    "tools": 6,
}
FOREIGN = {"bitsandbytes", "unsloth", "unsloth_zoo", "wrapt", "transformers", "peft", "trl"}


def imports_of(path: Path) -> set[str]:
    """Absolute names of everything a file imports, anywhere in it."""
    package = ["nf4_patch", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module or ""]).rstrip(".")
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return names


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize(
    "path", [p for p in sorted(ROOT.rglob("*.py")) if floor_of(p) in FLOORS], ids=lambda p: str(p.relative_to(ROOT))
)
def test_floor_imports_only_what_lies_below(path):
    floor = FLOORS[floor_of(path)]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "nf4_patch" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS[parts[1]] <= floor, f"{path.name} imports {name}"
        assert parts[0] not in ("benchmarks", "tests"), "the wheel has neither"
        if floor == 0:
            assert parts[0] not in FOREIGN, f"nf4 must not know {parts[0]}"
            assert name not in ("os", "json", "pathlib", "nf4_patch.patching.config"), (
                "nf4 must read no environment and no file"
            )


def graph() -> dict[str, set[str]]:
    """For each module of the package the others that it imports, anywhere in it."""
    modules = {".".join(("nf4_patch", *p.relative_to(ROOT).with_suffix("").parts)): p for p in ROOT.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {name: (imports_of(path) & modules.keys()) - {name} for name, path in modules.items()}


def test_imports_form_no_ring():
    """What imports nothing that is left is taken away, until nothing is left."""
    left = graph()
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    assert not left, f"in a ring, or above one: {sorted(left)}"


OPTION_FOLDERS = ("cache", "lora", "matmul", "moe", "offload")


def core() -> dict[str, set[str]]:
    """The modules of nf4 and patching, with what each imports."""
    return {name: imported for name, imported in graph().items() if name.split(".")[1:2] in (["nf4"], ["patching"])}


@pytest.mark.parametrize("name", core())
def test_core_imports_only_the_core(name):
    below = ("nf4_patch.nf4", "nf4_patch.patching", "nf4_patch.version")
    assert not {each for each in core()[name] if not each.startswith(below)} - {"nf4_patch"}


@pytest.mark.parametrize("name", core())
def test_core_names_no_option(name):
    """Neither as a string nor as a path to its folder: a gate, a variable or a target of an option is asked for in its folder."""
    path = ROOT.joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    folders = tuple(f".{folder}" for folder in OPTION_FOLDERS)
    named = [text for text in strings if isinstance(text, str) and (text in OPTIONS or text.startswith(folders))]
    assert not named, f"{name} names {named}"


@pytest.mark.parametrize("folder", OPTION_FOLDERS)
def test_the_table_of_options_is_full_before_anything_reads_it(folder):
    """The modules ``option`` that fill it import neither the switch nor TARGETS, which are made from it."""
    allowed = {"nf4_patch", "nf4_patch.patching", "nf4_patch.patching.option", "nf4_patch.patching.target"}
    assert graph()[f"nf4_patch.{folder}.option"] <= allowed


def test_an_option_is_one_row_and_one_folder():
    """Its rows are made in its folder or by an adapter; each is in TARGETS, and its report is a field of Status."""
    assert set(OPTIONS.values()) <= set(VARIABLES)
    fields = {field.name for field in dataclasses.fields(Status)}
    for name, option in OPTIONS.items():
        assert option.argument == name and option.default == "off" and option.on
        assert {target.only for target in option.targets} <= {name, ""}
        assert all(target in TARGETS for target in option.targets)
        assert (option.report is None) is (option.lines is None) is (name not in fields)


def test_kernel_files_hold_kernels_only():
    files = sorted(ROOT.rglob("*kernels.py"))
    assert len(files) == 4, "a kernel file was moved where this test does not look"
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                assert any("jit" in ast.unparse(decorator) for decorator in node.decorator_list), node.name


# What is asked of PyTorch about a GPU elsewhere than in nf4/runtime.py, which tests exchange.
ASKED = {
    "nf4/dequantize/reference.py": {"is_cuda"},  # whose bits: those of bitsandbytes' CUDA library or of its CPU library
    "moe/loading.py": {"empty_cache", "is_cuda"},
    "matmul/unsloth.py": {"cuda"},  # autocast
    # the memory of PyTorch's allocator, which has none on a CPU
    "cache/allocator.py": {"is_initialized", "memory"},
    "cache/auto.py": {"device_count", "empty_cache", "is_cuda", "mem_get_info", "memory_reserved"},
    # memory of the host that GPUs read, and the stream of its copies: a class of its own, which tests exchange
    "offload/prefetch.py": {
        "Event", "Stream", "cuda", "cudart", "current_stream", "device", "is_current_stream_capturing", "stream", "synchronize"
    },
    "patching/target.py": {"device_count"},
}  # fmt: skip


def asked_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (
            ast.unparse(node.value) == "torch.cuda" or node.attr == "is_cuda" or node.attr.startswith("_cuda")
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value == "cuda":
            found.add("cuda")
    return found - {"OutOfMemoryError"}


def test_one_module_asks_about_the_device():
    paths = [path for path in ROOT.rglob("*.py") if floor_of(path) in FLOORS.keys() - {"tools"}]
    found = {str(path.relative_to(ROOT)): asked_in(path) for path in paths}
    assert found.pop("nf4/runtime.py")
    assert {name: asked for name, asked in found.items() if asked} == ASKED
