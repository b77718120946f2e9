"""No GPU: the kernels are imported under Triton's interpreter, so that every patched function hits on CPU tensors."""

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
    """``torch.equal`` alone takes the same numbers in two dtypes for equal."""
    return got.dtype is want.dtype and _same_numbers(got, want)


torch.equal = _equal
if not GPU:
    import quick_interpreter

    quick_interpreter.install()

import nf4_patch  # noqa: E402
from nf4_patch.cache.store import cache  # noqa: E402
from nf4_patch.nf4.weight import forget  # noqa: E402
from nf4_patch.patching.counters import counters  # noqa: E402

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
    """What was there before a module is looked at by no collection of garbage in it: that takes seconds, and many tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def monkeypatch(monkeypatch):
    """As pytest's, which replaces what a class has from ``type`` alone, such as ``__call__``, and nothing then calls."""
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
    """Of the dequantization too: see quick_interpreter."""
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
    """Lines of the log that do not say whose they are."""

    def emit(self, record):
        if not record.getMessage().startswith("nf4_patch"):
            unnamed.append(record.getMessage())


unnamed: list[str] = []
logging.getLogger("nf4_patch").addHandler(Unnamed())


@pytest.fixture(autouse=True)
def off_and_counted_from_zero():
    """Whatever a test leaves on, the next one starts with nothing. What is logged begins with the name of the package."""
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
    """The patch is on, and a fallback that is not expected fails the test."""
    nf4_patch.enable(**options)
    yield nf4_patch
    unexpected = {key: n for key, n in counters.fallbacks.items() if not key[1].is_expected}
    missed = {f"{target}: {reason.name}": n for (target, reason), n in unexpected.items()}
    assert not missed, f"fell back silently: {missed}"


@pytest.fixture
def patched(request):
    """With the options that the module of the test names in ON."""
    yield from switched_on(**getattr(request.module, "ON", {}))


@pytest.fixture
def auto():
    """As ``patched``, with the fused matmul switched on."""
    yield from switched_on(matmul="auto")


@pytest.fixture
def on(device, request):
    """As ``patched``, but the test itself looks at what fell back."""
    nf4_patch.enable(**getattr(request.module, "ON", {}))
    return device


@pytest.fixture
def on_with_matmul():
    """As ``on``, with the fused matmul switched on."""
    nf4_patch.enable(matmul="auto")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """A random Llama of one layer, saved."""
    from benchmarks.checkpoint import Shape, save

    folder = tmp_path_factory.mktemp("llama")
    save(folder, Shape(128, 256, 1, 4, 2))
    return str(folder)
