"""The wheel, built and tried in an environment with nothing of this checkout: import, doctor, verify."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_wheel_works_in_an_empty_environment():
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([ROOT / "scripts" / "wheel", "--light"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "none differs" in done.stdout
    assert done.stdout.strip().endswith(".whl")
