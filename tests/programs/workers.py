"""Forked and started processes have the patch by NF4_PATCH=1, and end cleanly."""

import multiprocessing
import subprocess
import sys
from importlib.metadata import entry_points
import bitsandbytes.functional


def child(queue):
    import bitsandbytes.functional as F
    import nf4_patch

    queue.put((nf4_patch.is_enabled(), hasattr(F.dequantize_4bit, "__wrapped__")))


context = multiprocessing.get_context("fork")
queue = context.Queue()
worker = context.Process(target=child, args=(queue,))
worker.start()
assert queue.get(timeout=120) == (True, True)
worker.join(60)
assert worker.exitcode == 0
if any(e.name == "nf4_patch" for e in entry_points(group="bitsandbytes.backends")):  # the package is installed
    code = "import bitsandbytes.functional as F; print(hasattr(F.dequantize_4bit, '__wrapped__'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True"]
