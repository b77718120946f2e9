"""examples/t4_colab.ipynb is what tests/gpu/test_notebook.py runs: plain Python, no output kept, nothing to edit."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "examples" / "t4_colab.ipynb").read_text()
NOTEBOOK = json.loads(TEXT)
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
GPU, INSTALL = CODE[:2]
COMPARE = next(cell for cell in CODE if "qlora_peft.py" in cell)
ADDRESS = "https://example.org/nf4_patch-0.1.0-py3-none-any.whl"


def test_cells_are_plain_python_without_output():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["accelerator"]) == (4, "GPU")
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"]), "a number belongs to the GPU that measured it"
    for cell in CODE:  # no magics: what is tested is what Colab runs
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell)))


def test_its_commands_exist():
    from nf4_patch.tools.cli import main

    for verb in ("doctor", "verify", "bench"):
        assert verb in main.commands
        assert f'\\"{verb}\\"' in TEXT


def test_without_a_gpu_it_says_what_to_choose(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="Choose a GPU runtime"):
        exec(GPU, {})
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    exec(GPU, {})


RUN = {"losses": [6.3, 6.2], "adapter": "0a"}


@pytest.mark.parametrize(
    ("off", "on", "verdict"),
    [
        (RUN, RUN, "the same bits"), (RUN, RUN | {"adapter": "0b"}, "DIFFERENT"), (RUN, RUN | {"losses": [6.3]}, "DIFFERENT"),
        ({}, RUN, "not compared"), (RUN, {}, "not compared"), ({}, {}, "not compared"),  # a run that failed wrote nothing
    ],
)  # fmt: skip
def test_what_it_says_of_two_trainings(off, on, verdict, tmp_path, capsys):
    given = {"run": lambda *words, **variables: None, "read": {"off": off, "on": on}.get, "os": os}
    exec(COMPARE, given | {"examples": tmp_path, "results": tmp_path})
    assert f"losses and adapter: {verdict}" in capsys.readouterr().out


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """What the first cell hands to pip where the package is not there; it has run when the list is not empty."""
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
    assert installed == [[f"{wheel}[bench]"]]


def test_installs_from_an_upload(installed, monkeypatch):
    colab = types.SimpleNamespace(files=types.SimpleNamespace(upload=lambda: {"uploaded.whl": b""}))
    monkeypatch.setitem(sys.modules, "google", types.SimpleNamespace(colab=colab))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    exec(INSTALL, {})
    assert installed == [["uploaded.whl[bench]"]]


@pytest.mark.parametrize("given", ["typed", "in the environment"])
def test_installs_from_an_address(installed, monkeypatch, given):
    if given == "in the environment":
        monkeypatch.setenv("NF4_PATCH_SOURCE", ADDRESS)
    exec(INSTALL, {})
    assert installed == [[f"nf4-patch[bench] @ {ADDRESS}"]]


def test_installs_nothing_twice(installed, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    exec(INSTALL, {})
    assert installed == []
