"""Python runs this file at its start if this folder is on PYTHONPATH.

The CPU becomes the device of the kernels when these are imported. quick_interpreter.py imports PyTorch, which takes
over a second. A process without the kernels does not import it.
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
