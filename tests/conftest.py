"""No GPU: the kernels are imported under Triton's interpreter, so that every patched function hits on CPU tensors.

Only the kernels: TRITON_INTERPRET is unset again before Unsloth or Inductor define theirs.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import triton  # noqa: F401 (before the variable is set: Triton's own functions stay compiled)

GPU = torch.cuda.is_available()
os.environ["NF4_PATCH_CALIBRATION"] = "off"  # the shipped tables, whatever this machine remembers

if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    import nf4_patch.nf4.dequantize.kernels  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(config, items):
    if not GPU:
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if GPU else torch.device("cpu")


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def watched(**options: str):
    """The patch is on, counts start at zero; the test itself looks at what fell back."""
    import nf4_patch
    from nf4_patch.patching.counters import counters

    nf4_patch.enable(**options)
    counters.reset()
    yield nf4_patch, counters
    nf4_patch.disable()
    counters.reset()


@contextlib.contextmanager
def switched_on(**options: str):
    """The same, and a fallback that is not expected fails the test."""
    with watched(**options) as (package, counters):
        yield package
        unexpected = {key: n for key, n in counters.fallbacks.items() if not key[1].is_expected}
        missed = {f"{target}: {reason.name}": n for (target, reason), n in unexpected.items()}
    assert not missed, f"fell back silently: {missed}"


@pytest.fixture
def patched():
    with switched_on() as package:
        yield package


@pytest.fixture
def on(device):
    with watched():
        yield device


@pytest.fixture
def on_with_matmul():
    with watched(matmul="auto"):
        yield


@pytest.fixture
def auto():
    """As ``patched``, with the fused product switched on."""
    with switched_on(matmul="auto"):
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """A random Llama of one layer, saved."""
    from nf4_patch.tools import llama

    folder = tmp_path_factory.mktemp("llama")
    llama.save(folder, llama.Shape(128, 256, 1, heads=4, key_value_heads=2))
    return str(folder)
