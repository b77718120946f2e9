"""Python runs this as it starts with this folder on PYTHONPATH: the CPU is then the device of our kernels (quick_interpreter.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import quick_interpreter

quick_interpreter.install()
del sys.path[0]
