"""What stands where: kernels, options, questions about the device. `lint-imports` reads the imports."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import nf4_patch
from nf4_patch.options import OPTIONS
from nf4_patch.patching.config import VARIABLES
from nf4_patch.patching.target import ALWAYS
from nf4_patch.patching.targets import TARGETS
from nf4_patch.snapshot import Status

ROOT = Path(nf4_patch.__file__).parent


def test_an_option_is_one_row_and_one_folder():
    """Its rows are made in its folder or by an adapter; each is in TARGETS, and its report is a field of Status."""
    assert set(OPTIONS.values()) <= set(VARIABLES)
    fields = {field.name for field in dataclasses.fields(Status)}
    for name, option in OPTIONS.items():
        assert option.argument == name and option.default == "off" and option.on
        assert {target.option for target in option.targets} <= {name, "", ALWAYS}
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
    # times kernels
    "matmul/measurement.py": {
        "Event", "_sleep", "cuda", "current_stream", "get_device_properties", "mem_get_info", "memory_allocated",
        "memory_reserved", "synchronize",
    },
    # the memory of PyTorch's allocator, which has none on a CPU
    "cache/allocator.py": {"is_initialized", "memory"},
    "cache/auto.py": {"device_count", "empty_cache", "is_cuda", "mem_get_info", "memory_reserved"},
    # memory of the host that GPUs read, and the stream of its copies: a class of its own, which tests exchange
    "offload/host_memory.py": {
        "Event", "Stream", "cuda", "cudart", "current_stream", "device", "is_current_stream_capturing", "stream", "synchronize"
    },
    "adapters/unsloth.py": {"device_count"},
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
    paths = [path for path in ROOT.rglob("*.py") if "tools" not in path.parts and "graphs" not in path.parts]
    found = {str(path.relative_to(ROOT)): asked_in(path) for path in paths}
    assert found.pop("nf4/runtime.py")
    assert {name: asked for name, asked in found.items() if asked} == ASKED
