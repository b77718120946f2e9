"""Set up the tests.

Without a GPU, the kernels are imported under Triton's interpreter, so that every patched function hits on CPU tensors.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections import Counter

import pytest
import torch

GPU = torch.cuda.is_available()

_same_numbers = torch.equal


def _equal(got, want):
    """Compare as ``torch.equal`` does, but also compare the dtypes."""
    return got.dtype is want.dtype and _same_numbers(got, want)


torch.equal = _equal
if not GPU:
    import quick_interpreter

    quick_interpreter.install()

import nf4_patch  # noqa: E402
from nf4_patch.cache.store import cache  # noqa: E402
from nf4_patch.nf4.dequantize import reference  # noqa: E402
from nf4_patch.nf4.weight import forget  # noqa: E402
from nf4_patch.patching.counters import counters  # noqa: E402
from nf4_patch.patching.quant_state import linear_weight  # noqa: E402

UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))  # in seconds since 1970, set by .ci/run


def pytest_runtest_setup(item):
    if time.time() > UNTIL:
        pytest.skip("the time for all tests is over")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config, items):
    found = Counter()
    for item in items:  # each run has every n-th case of a test that is marked ``every(n)``
        every = item.get_closest_marker("every")
        if every is not None and item.get_closest_marker("full") is None:
            place = item.nodeid.partition("[")[0]
            if found[place] % every.args[0]:
                item.add_marker("full")
            found[place] += 1
    if not GPU:
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(scope="module", autouse=True)
def garbage_of_its_own():
    """Keep objects that existed before a module out of the garbage collections of this module's tests, which would take seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def monkeypatch(monkeypatch):
    """Replace pytest's fixture.

    It refuses an attribute that a class has only from ``type``, such as ``__call__``, because nothing would call the
    replacement.
    """
    replace = monkeypatch.setattr

    def setattr(target, name, *arguments, **keywords):
        if isinstance(target, type) and not any(name in vars(base) for base in target.__mro__):
            raise AttributeError(f"{target.__name__} has no {name} of its own")
        replace(target, name, *arguments, **keywords)

    monkeypatch.setattr = setattr
    return monkeypatch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if GPU else torch.device("cpu")


@pytest.fixture(scope="module")
def every_launch_interpreted():
    """Interpret every launch, also those of the dequantization kernel (see quick_interpreter.py)."""
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setattr(quick_interpreter.Interpreted, "always", True)
        yield


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Unnamed(logging.Handler):
    """Lines of the log that do not begin with the package's name."""

    def emit(self, record):
        if not record.getMessage().startswith("nf4_patch"):
            unnamed.append(record.getMessage())


unnamed: list[str] = []
logging.getLogger("nf4_patch").addHandler(Unnamed())


@pytest.fixture(autouse=True)
def off_and_counted_from_zero():
    """After each test, turn the patch off and set all counts to zero. Each line of the log must begin with the package's name."""
    yield
    assert not [unnamed.pop() for _ in unnamed[:]]
    nf4_patch.disable()
    counters.reset()
    for counter in [*counters.hit_counters.values()]:
        counter.addresses.clear()
    forget()
    cache.hits = cache.misses = 0
    cache.uncached.clear()
    if graphs := sys.modules.get("nf4_patch.graphs.layers"):
        graphs.graphs.forget()
        graphs.graphs.largest.clear()
        graphs.graphs.replays = 0
    if prefetch := sys.modules.get("nf4_patch.offload.prefetch"):
        prefetch.prefetchers.clear()
    if activations := sys.modules.get("nf4_patch.activations.layers"):
        activations.activations.forget()


def switched_on(**options: str):
    """Turn the patch on. A fallback that is not expected fails the test."""
    nf4_patch.enable(**options)
    yield nf4_patch
    unexpected = {key: n for key, n in counters.fallbacks.items() if not key[1].is_expected}
    missed = {f"{target}: {reason.name}": n for (target, reason), n in unexpected.items()}
    assert not missed, f"fell back silently: {missed}"


@pytest.fixture
def patched(request):
    """Turn the patch on with the options in ON, which the test's module defines."""
    yield from switched_on(**getattr(request.module, "ON", {}))


@pytest.fixture
def auto():
    """Turn the patch on as ``patched`` does, with the fused matmul."""
    yield from switched_on(matmul="auto")


@pytest.fixture
def on(device, request):
    """Turn the patch on as ``patched`` does, but let the test itself check the fallbacks."""
    nf4_patch.enable(**getattr(request.module, "ON", {}))
    return device


@pytest.fixture
def on_with_matmul():
    """Turn the patch on as ``on`` does, with the fused matmul."""
    nf4_patch.enable(matmul="auto")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Return the folder of a random Llama with one layer."""
    from benchmarks.checkpoint import Shape, save

    folder = tmp_path_factory.mktemp("llama")
    save(folder, Shape(128, 256, 1, 4, 2))
    return str(folder)


@pytest.fixture
def linear_op(device, monkeypatch):
    """Let bitsandbytes 0.50's forward run on the CPU as it runs on a GPU."""
    if device.type == "cpu":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    import bitsandbytes.backends.cuda.ops as cuda_ops

    def gemm_4bit(A, B, shapeB, absmax, blocksize, quant_type, bias=None, *second):
        if nf4_patch.is_enabled():
            return cuda_ops._dequant_linear_fallback(A, B, shapeB, absmax, blocksize, quant_type, bias, *second)
        weight = linear_weight(A.dtype, B, shapeB, absmax, blocksize, quant_type, *(second or (None,) * 3))
        return torch.nn.functional.linear(A, reference.dense(weight), bias)

    with torch.library._scoped_library("bitsandbytes", "IMPL") as library:
        if device.type == "cpu":
            library.impl("gemm_4bit", gemm_4bit, "CPU")
        yield device
        nf4_patch.disable()
