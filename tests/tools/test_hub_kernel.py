"""The repository for Hugging Face's `kernels`: its files, and its bits when the real package loads it."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from subprocess_python import program

from scripts import hub_kernel

OWN = Path(sys.prefix) / "kernels-0.17.2"  # where scripts/test puts it
INSTALLED = [folder for folder in (OWN,) if folder.is_dir()]
NEEDS = pytest.mark.skipif(
    not INSTALLED and importlib.util.find_spec("kernels") is None, reason="kernels is not installed"
)


def test_the_repository_imports_nothing_but_torch_triton_and_itself(tmp_path):
    hub_kernel.build(tmp_path)
    variant, source = tmp_path / "build" / "torch-universal", tmp_path / "torch-ext" / "nf4_dequantize"
    files = {path.relative_to(source): path.read_text() for path in source.rglob("*.py")}
    assert files == {path.relative_to(variant): path.read_text() for path in variant.rglob("*.py")} and len(files) > 10
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module]
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"torch", "triton"}, path


def test_another_source_has_another_name(tmp_path, monkeypatch):
    """`kernels` distinguishes two versions of a kernel by their ids."""
    ids = []
    for init in (hub_kernel.INIT, hub_kernel.INIT, hub_kernel.INIT + "\n"):
        monkeypatch.setattr(hub_kernel, "INIT", init)
        hub_kernel.build(tmp_path)
        ids.append(json.loads((tmp_path / "build" / "torch-universal" / "metadata.json").read_text())["id"])
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.full
@NEEDS
def test_kernels_loads_it_and_its_bits_are_those_of_bitsandbytes(tmp_path):
    hub_kernel.build(tmp_path)
    assert "5 states: the same bits" in program("hub_kernel", tmp_path, *INSTALLED, HF_HUB_OFFLINE="1").stdout
