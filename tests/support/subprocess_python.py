"""A fresh interpreter for what can be tried only once a process: import order, environment, silence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

# Before anything else the kernels are imported under the interpreter, as conftest.py does.
INTERPRETED = """
import os, triton
os.environ["TRITON_INTERPRET"] = "1"
import nf4_patch.nf4.dequantize.kernels
del os.environ["TRITON_INTERPRET"]
"""


def python(code: str, *, path: Path | None = None, cwd: Path | None = None, check: bool = True, **environ: str):
    """Run ``code``; its completed process, with output as text. ``path`` goes before site-packages."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NF4_") and k != "TRITON_INTERPRET"}
    environment |= {"NF4_PATCH_CALIBRATION": "off"} | environ
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, cwd=cwd
    )
    if check:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done
