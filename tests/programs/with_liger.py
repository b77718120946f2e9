"""Run a script as __main__ with Liger's kernels in transformers' Llama: ``with_liger.py SCRIPT ARGUMENTS``."""

import runpy
import sys
from pathlib import Path

from liger_kernel.transformers import apply_liger_kernel_to_llama

apply_liger_kernel_to_llama()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
