"""examples/t4_colab.ipynb is what tests/gpu/test_notebook.py runs: plain Python, no output kept, nothing to edit."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "examples" / "t4_colab.ipynb").read_text()
NOTEBOOK = json.loads(TEXT)
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
INSTALL = CODE[0]
ADDRESS = "https://example.org/nf4_patch-0.1.0-py3-none-any.whl"


def test_cells_are_plain_python_without_output():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["accelerator"]) == (4, "GPU")
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"]), "a number belongs to the GPU that measured it"
    for cell in CODE:  # no magics: what is tested is what Colab runs
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell)))


def test_its_commands_exist():
    from nf4_patch.tools.cli import VERBS

    for verb in ("doctor", "verify", "bench"):
        assert verb in VERBS
        assert f'\\"{verb}\\"' in TEXT


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """What the first cell hands to pip where neither package is there; it has run when the list is not empty."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[5:]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("builtins.input", lambda prompt: f" {ADDRESS} ")
    monkeypatch.delenv("NF4_PATCH_SOURCE", raising=False)
    monkeypatch.chdir(tmp_path)
    return commands


def test_installs_from_a_wheel_beside_it(installed, tmp_path):
    wheel = tmp_path / "nf4_patch-0.1.0-py3-none-any.whl"
    wheel.touch()
    exec(INSTALL, {})
    assert installed == [[f"{wheel}[bench,demo]", "unsloth"]]


def test_installs_from_an_upload(installed, monkeypatch):
    colab = types.SimpleNamespace(files=types.SimpleNamespace(upload=lambda: {"uploaded.whl": b""}))
    monkeypatch.setitem(sys.modules, "google", types.SimpleNamespace(colab=colab))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    exec(INSTALL, {})
    assert installed == [["uploaded.whl[bench,demo]", "unsloth"]]


@pytest.mark.parametrize("given", ["typed", "in the environment"])
def test_installs_from_an_address(installed, monkeypatch, given):
    if given == "in the environment":
        monkeypatch.setenv("NF4_PATCH_SOURCE", ADDRESS)
    exec(INSTALL, {})
    assert installed == [[f"nf4-patch[bench,demo] @ {ADDRESS}", "unsloth"]]


def test_installs_nothing_twice(installed, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    exec(INSTALL, {})
    assert installed == []
