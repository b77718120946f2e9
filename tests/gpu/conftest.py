"""The model that the examples train on a GPU."""

from __future__ import annotations

import os
import sys

import pytest
from run_example import EXAMPLES, run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Return the folder of four random layers with Llama-3.1-8B's shapes: 1.8 GB, made once."""
    folder = tmp_path_factory.mktemp("llama")
    code = f"import offline; offline.checkpoint('random', '8b-4layers', {str(folder)!r})"
    run([sys.executable, "-c", code], folder, PYTHONPATH=f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    return str(folder)
