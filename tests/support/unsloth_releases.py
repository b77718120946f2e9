"""Releases of Unsloth before and after 2026.9.13, each imported in a separate process."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocess_python import program

FOLDERS = {"2026.10.9": None, "2026.9.7": Path(sys.prefix) / "unsloth-2026.9.7"}  # None: the installed one
RELEASES = pytest.mark.parametrize("release", ["2026.10.9", pytest.param("2026.9.7", marks=pytest.mark.full)])


def with_unsloth(release: str, cwd: Path, name: str, *words: object, **options: Any) -> str:
    """Return the output of tests/programs/NAME.py. Without a GPU, the kernels are interpreted, unless ``options`` forbid this."""
    folder = FOLDERS[release]
    if (folder is not None and not folder.is_dir()) or importlib.util.find_spec("unsloth") is None:
        assert not os.environ.get("CI"), f"unsloth {release} is missing: scripts/test installs it"
        pytest.skip(f"unsloth {release} is not installed: scripts/test installs it")
    options.setdefault("interpreted", not torch.cuda.is_available())
    return program(name, *words, path=folder, cwd=cwd, UNSLOTH_ALLOW_CPU="1", **options).stdout
