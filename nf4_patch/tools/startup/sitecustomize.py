"""Code that runs at the start of every Python process under ``nf4-patch run``, which puts this folder on PYTHONPATH.

In a Python without nf4_patch, the file changes nothing.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
hidden = PathFinder.find_spec("sitecustomize")  # the environment's own sitecustomize, which Python did not run
try:
    if hidden is not None and hidden.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(hidden)
        hidden.loader.exec_module(module)
finally:
    try:
        from nf4_patch.tools.run import watch
    except ImportError:
        pass
    else:
        watch()
