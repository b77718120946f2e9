"""Python runs this as it starts with this folder on PYTHONPATH: the CPU is the device of our kernels as soon as they are imported.

See quick_interpreter.py. It imports PyTorch, which takes over a second, so that a process without our kernels does without it.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def exchange(_package):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import quick_interpreter

    quick_interpreter.install()
    del sys.path[0]


if find_spec("triton") is not None:  # or it is another Python, without our packages
    import wrapt

    wrapt.register_post_import_hook(exchange, "nf4_patch.nf4")
