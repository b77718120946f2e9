"""Python runs this as it starts with this folder on PYTHONPATH: the CPU is then the device of our kernels (quick_interpreter.py)."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("triton") is not None:  # or it is another Python, without our packages
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import quick_interpreter

    quick_interpreter.install()
    del sys.path[0]
