"""Find out whether another thread of the process might use the GPU.

A capture of a CUDA graph would make such a thread fail, because the GPU's random generator in PyTorch and
``torch.cuda.synchronize`` belong to the whole process. PyTorch does not say which threads use the GPU, so this module
reads their stacks.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from types import FrameType, ModuleType

import torch

# Threads of PyTorch itself that neither draw random numbers nor wait for the whole GPU: those of a DataLoader and of Inductor.
HARMLESS = "torch.utils.data.", "torch._inductor.", "torch.multiprocessing."
INSTALLED = tuple({os.path.join(os.path.realpath(path), "") for path in sysconfig.get_paths().values()})


@functools.lru_cache(maxsize=4096)  # keyed by file, because equal code objects may come from different files
def is_installed(file: str) -> bool:
    return file.startswith("<frozen ") or os.path.realpath(file).startswith(INSTALLED)


def may_use_gpu(frame: FrameType) -> bool:
    """Return whether a running function is the user's, or in a module that imports PyTorch."""
    if not is_installed(frame.f_code.co_filename):
        return True
    namespace = frame.f_globals
    if f"{namespace.get('__name__')}.".startswith(HARMLESS):
        return False
    modules = [value for value in list(namespace.values()) if isinstance(value, ModuleType)]
    return namespace.get("__name__", "").split(".")[0] == "torch" or torch in modules


def others_may_use_gpu() -> str:
    """Return the name of a function in another thread that may use the GPU, or ""."""
    running = sys._current_frames()
    del running[threading.get_ident()]  # A frame that refers to itself would keep all its callers' frames alive.
    for innermost in running.values():
        frame: FrameType | None = innermost
        while frame is not None:
            if may_use_gpu(frame):
                return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
            frame = frame.f_back
    return ""
