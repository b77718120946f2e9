"""The patch in axolotl's real decode of the experts that are used: bits, fallbacks, undo.

Only the file and what it imports is loaded: the packages around it ask for axolotl's whole training stack.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from subprocess_python import program

AXOLOTL = Path(sys.prefix) / "axolotl-0.19.0"


@pytest.mark.full
def test_axolotl(tmp_path):
    if not AXOLOTL.is_dir():
        assert not os.environ.get("CI"), "axolotl 0.19.0 is missing: scripts/test --rest installs it"
        pytest.skip("axolotl 0.19.0 is not installed: scripts/test --rest installs it")
    program("axolotl_experts", AXOLOTL, interpreted=not torch.cuda.is_available(), cwd=tmp_path)
