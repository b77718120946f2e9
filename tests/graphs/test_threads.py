"""The functions that a thread runs decide whether it might use the GPU while a layer is captured."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from nf4_patch.graphs.threads import may_use_gpu, others_may_use_gpu

INSTALLED = threading.__file__


@pytest.mark.parametrize(
    ("file", "namespace", "may"),
    [
        ("/home/user/script.py", {"__name__": "script"}, True), (INSTALLED, {"__name__": "queue"}, False),
        (INSTALLED, {"__name__": "trl.trainer", "torch": torch}, True), (INSTALLED, {"__name__": "torch.cuda"}, True),
        (INSTALLED, {"__name__": "torch.utils.data.worker", "torch": torch}, False),
        ("<frozen importlib>", {"__name__": "importlib"}, False),
    ],
    ids=["a script's", "a library's", "that imports PyTorch", "PyTorch's", "a DataLoader's", "Python's"],
)  # fmt: skip
def test_a_function(file, namespace, may):
    exec(compile("found = get()", file, "exec"), namespace := {**namespace, "get": lambda: sys._getframe(1)})
    assert may_use_gpu(namespace["found"]) == may


def test_a_function_below_a_librarys():
    """The innermost function is that of an event."""
    stop = threading.Event()

    def waits() -> None:
        stop.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    found = others_may_use_gpu()
    stop.set()
    thread.join()
    assert found == f"{__name__}.waits"
