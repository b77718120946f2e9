"""One floor, one knowledge, one direction: tools -> patching -> nf4."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

import nf4_patch
from nf4_patch.config import VARIABLES
from nf4_patch.patching.options import OPTIONS
from nf4_patch.patching.status import Status
from nf4_patch.patching.targets import TARGETS

ROOT = Path(nf4_patch.__file__).parent
FLOORS = {"nf4": 0, "patching": 1, "tools": 2}
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
            assert name not in ("os", "json", "pathlib", "nf4_patch.config"), "nf4 must read no environment and no file"


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


# The folders of the options, beside the core; the core knows them in its one table.
BESIDE = (
    "patching.cache",
    "patching.experts",
    "patching.lora",
    "patching.matmul",
    "nf4.low_rank",
    "nf4.matmul",
    "nf4.routing",
)
BESIDE = tuple(f"nf4_patch.{folder}" for folder in BESIDE)
TABLE = "nf4_patch.patching.options"
# What is tried first in one call: a compiled layer's cached weight, the product of a few rows, what cache="auto" watches.
TRIED_FIRST = {
    "nf4_patch.patching.adapters.bitsandbytes": {"nf4_patch.patching.cache.store", "nf4_patch.patching.matmul.product"},
    "nf4_patch.patching.adapters.unsloth": {"nf4_patch.patching.cache.pinned"},
}
# A gate that an adapter looks at.
NAMED = {
    "nf4_patch.patching.adapters.bitsandbytes": ["matmul"],
    "nf4_patch.patching.adapters.unsloth": ["cache"],
}


def core() -> dict[str, set[str]]:
    """The modules of nf4 and patching outside the options' folders, with what each imports."""
    return {
        name: imported
        for name, imported in graph().items()
        if name.split(".")[1:2] in (["nf4"], ["patching"]) and not name.startswith(BESIDE) and name != TABLE
    }


def test_core_imports_no_option():
    found = {name: {each for each in imported if each.startswith(BESIDE)} for name, imported in core().items()}
    assert {
        name: imported for name, imported in found.items() if imported - {"nf4_patch.patching.cache"}
    } == TRIED_FIRST


@pytest.mark.parametrize("name", core())
def test_core_names_no_option(name):
    """Neither as a string nor as a path to its folder: a gate, a variable or a target of an option is asked for in its folder."""
    path = ROOT.joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    folders = tuple(folder.removeprefix("nf4_patch.patching") for folder in BESIDE)
    named = [text for text in strings if isinstance(text, str) and (text in OPTIONS or text.startswith(folders))]
    assert named == NAMED.get(name, []), f"{name} names {named}"


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
    files = sorted((ROOT / "nf4").rglob("*kernels.py"))
    assert len(files) == 4, "a kernel file was moved where this test does not look"
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                assert any("jit" in ast.unparse(decorator) for decorator in node.decorator_list), node.name


# Lines of Python by folder, 3 % over what they were. A commit that needs more raises its number and says who gains what.
# nf4 and patching: 310 for the experts' forward, for who trains a mixture; ".": 30 for errors, unknown variables and an entry
# point that cannot raise, for everybody who misspells, misreads or moves something. patching: 20 for rows of other packages, for
# who has a library of their own; 70 for who trains packed experts under Liger's patch, or enables the option too late; 90 for
# checkpoints with a packed weight for every expert, for who has one, and for packed bytes that no cast of a model reaches, for who
# trains with TRL's ORPO. nf4: 90 and patching: 350 for LoRA in one function, for who trains with peft or TRL. patching: 40 for
# locks that a fork leaves free and bytes that an interrupt leaves uncharged, for who starts workers or stops a cell.
# nf4: 90 for fp32 adapters on tensor cores, patching: 130 for adapters on packed experts that are switched off, merged and named as
# on dense ones; tools: 400 for steps as TRL trains.
# patching: 400 and ".": 20 for packed experts in host memory, for who trains a mixture larger than the GPU.
# patching: 100 for rows, report and variable of an option in its own folder, for who adds an option or reads one alone.
# patching, all in the core but 30: 170 for copies that follow whoever stands at a name, cached weights that only their reader gets,
# modes and classes with functions of their own, and an interrupt at any line; for who has another library beside this one.
BUDGET = {"nf4": 2470, "patching": 5900, "tools": 2150, ".": 555}
CORE = 2920  # nf4 and patching without what stands beside it


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


@pytest.mark.parametrize("folder", BUDGET)
def test_lines(folder):
    lines = lines_of(ROOT.glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py"))
    assert 0.9 * BUDGET[folder] < lines <= BUDGET[folder], f"{folder} has {lines} lines"


def test_lines_of_the_core():
    places = (ROOT.joinpath(*name.split(".")[1:]) for name in core())
    lines = lines_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in places)
    assert 0.9 * CORE < lines <= CORE, f"the core has {lines} lines"


# What is asked of PyTorch about a GPU elsewhere than in nf4/runtime.py, which tests exchange.
ASKED = {
    "nf4/dequantize/reference.py": {"is_cuda"},  # whose bits: those of bitsandbytes' CUDA library or of its CPU library
    "patching/experts/loading.py": {"empty_cache", "is_cuda"},
    "patching/matmul/unsloth.py": {"cuda"},  # autocast
    # the memory of PyTorch's allocator, which has none on a CPU
    "patching/cache/allocator.py": {"is_initialized", "memory"},
    "patching/cache/auto.py": {"device_count", "empty_cache", "is_cuda", "mem_get_info", "memory_reserved"},
    # memory of the host that GPUs read, and the stream of its copies: a class of its own, which tests exchange
    "patching/experts/offload.py": {
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
    paths = [path for path in ROOT.rglob("*.py") if floor_of(path) in ("nf4", "patching")]
    found = {str(path.relative_to(ROOT)): asked_in(path) for path in paths}
    assert found.pop("nf4/runtime.py")
    assert {name: asked for name, asked in found.items() if asked} == ASKED
