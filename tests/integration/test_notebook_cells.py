"""examples/t4_colab.ipynb is plain Python, as tests/gpu/test_example_runs.py runs it, and needs no edit."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nf4_patch.tools.cli import main

TEXT = (Path(__file__).parents[2] / "examples" / "t4_colab.ipynb").read_text()
NOTEBOOK = json.loads(TEXT)
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
GPU, INSTALL = CODE[:2]
COMPARE = next(cell for cell in CODE if "qlora_peft.py" in cell)
WHEEL = "nf4_patch-0.1.0-py3-none-any.whl"
ADDRESS = f"https://example.org/{WHEEL}"


def test_no_output_is_saved():
    """A saved output would be older than the code."""
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])


def test_cells_are_plain_python():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["accelerator"]) == (4, "GPU")
    for cell in CODE:  # no magics: what is tested is what Colab runs
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell)))
    verbs = {verb for verb in main.commands if f'\\"{verb}\\"' in TEXT}
    assert verbs == {"doctor", "verify"}


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
    given = {"run": lambda *words, **variables: None, "read": {"off": off, "on": on, "fast": RUN}.get, "os": os}
    exec(COMPARE, given | {"examples": tmp_path, "results": tmp_path})
    assert f"losses and adapter: {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("graphs", "verdict"), [([6.3, 6.2], "the same bits"), ([6.3, 6.1], "DIFFERENT"), (None, "not compared")]
)
def test_what_it_says_of_trainings_with_unsloth(graphs, verdict, tmp_path, capsys):
    """Kept activations may change the last digits under Unsloth, so their losses are not compared."""
    ran = {}
    records = {
        "unsloth_off": RUN,
        "unsloth_on": RUN,
        "unsloth_graphs": {"losses": graphs},
        "unsloth_activations": {"losses": [6.31]},
    }
    given = {
        "run": lambda name, *words, **variables: ran.update({name: variables}), "read": records.get, "training": [],
        "importlib": importlib, "examples": tmp_path, "results": tmp_path,
    }  # fmt: skip
    exec(next(cell for cell in CODE if "qlora_unsloth.py" in cell), given)
    assert f"losses with Unsloth: {verdict}" in capsys.readouterr().out
    assert [*ran.values()] == [{"NF4_PATCH": "0"}, {}, {"NF4_PATCH_GRAPHS": "auto"}, {"NF4_PATCH_ACTIVATIONS": "auto"}]


def upload(monkeypatch, folder):
    colab = types.SimpleNamespace(files=types.SimpleNamespace(upload=lambda: {"uploaded.whl": b""}))
    monkeypatch.setitem(sys.modules, "google", types.SimpleNamespace(colab=colab))
    monkeypatch.setitem(sys.modules, "google.colab", colab)


def there(monkeypatch, *names):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in names or None)


# where the package comes from, what makes it so, and what the first cell then hands to pip
SOURCES = {
    "a wheel beside it": (lambda monkeypatch, folder: (folder / WHEEL).touch(), f"{{folder}}/{WHEEL}[bench]"),
    "an upload": (upload, "uploaded.whl[bench]"),
    "typed": (lambda monkeypatch, folder: None, f"nf4-patch[bench] @ {ADDRESS}"),
    "in the environment": (
        lambda monkeypatch, folder: monkeypatch.setenv("NF4_PATCH_SOURCE", ADDRESS),
        f"nf4-patch[bench] @ {ADDRESS}",
    ),
    "installed": (lambda monkeypatch, folder: there(monkeypatch, "unsloth", "nf4_patch"), None),
    "enter alone": (lambda monkeypatch, folder: there(monkeypatch, "unsloth"), RuntimeError("Upload a wheel")),
}


@pytest.mark.parametrize("source", SOURCES)
def test_where_it_installs_from(source, monkeypatch, tmp_path):
    commands: list[list[str]] = []
    typed = f" {ADDRESS} " if source == "typed" else ""
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[5:]))
    there(monkeypatch)
    monkeypatch.setattr("builtins.input", lambda prompt: typed)
    monkeypatch.delenv("NF4_PATCH_SOURCE", raising=False)
    monkeypatch.chdir(tmp_path)
    prepare, wanted = SOURCES[source]
    prepare(monkeypatch, tmp_path)
    fails = isinstance(wanted, RuntimeError)  # pip would take "[bench]" for a package
    with pytest.raises(RuntimeError, match=str(wanted)) if fails else contextlib.nullcontext():
        exec(INSTALL, {})
    assert commands == ([["unsloth"], [wanted.format(folder=tmp_path)]] if isinstance(wanted, str) else [])
