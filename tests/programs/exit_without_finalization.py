"""Run a script as __main__, then leave without Python's finalization: torchrun exit_without_finalization.py SCRIPT ARGUMENTS.

A gloo thread that gives a collective's tensors back while Python finalizes ends the process with SIGABRT ("terminate
called without an active exception"): a bare all_gather, no patch, 3 of 30 runs on two busy cores (torch 2.13); so, 0 of
50. A barrier does not help (it holds the work before it), nor does destroying the group under FSDP2, whose caches keep
it. What the script itself raises or exits with still counts.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
