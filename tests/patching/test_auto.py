"""``cache="auto"``: what it waits for, takes and gives back. What a GPU has free is made up here: see gpu/test_auto_gpu.py."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import nf4_patch
from nf4_patch.patching.cache import auto
from nf4_patch.patching.cache.store import cache

GIB = 2**30
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has tests of its own: gpu/test_auto_gpu.py")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of which a test says what is free."""
    known = {"free": 10 * GIB, "reserved": 4 * GIB, "others": GIB, "margin": GIB}
    monkeypatch.setattr(auto.Memory, "of", lambda device: auto.Memory(**known))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: known["reserved"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    nf4_patch.enable(cache="auto")
    yield known
    nf4_patch.disable()


def steps(count=auto.STEPS):
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(count):
        optimizer.step()


def test_it_takes_what_is_free_after_two_steps_of_the_largest_batch(gpu):
    assert cache.budget == 0
    steps()
    assert cache.budget == 0  # no library said how large its batch is
    cache.auto.batch(1024, 512)
    steps(1)
    assert cache.budget == 0
    steps(1)
    assert cache.budget == 9 * GIB
    assert "9 GiB" in str(nf4_patch.status())
    cache.auto.batch(512, 512)
    gpu["free"] = 2 * GIB
    steps(4)
    assert cache.budget == 9 * GIB  # nothing that was not seen; what is free now is what the cache left


@pytest.mark.parametrize("larger", [(2048, 512), (1024, 1024), (512, 1024)])
def test_it_gives_back_before_a_larger_batch(gpu, larger):
    cache.auto.batch(1024, 512)
    steps()
    cache.auto.batch(*larger)
    assert cache.budget == 0
    gpu["free"] = 3 * GIB
    steps()
    assert cache.budget == 2 * GIB


@pytest.mark.parametrize("change", [{"free": GIB // 4}, {"others": 2 * GIB}])
def test_it_gives_back_where_memory_runs_short_or_a_process_comes(gpu, change):
    cache.auto.batch(1024, 512)
    steps()
    cache.taken[0] = GIB
    gpu.update(change)
    cache.auto.look()
    assert cache.budget == 0
    cache.taken[0] = 0
    steps()
    assert cache.budget == 0  # as long as it is so


def test_it_takes_nothing_where_others_use_the_gpu(gpu):
    gpu["others"] = 8 * GIB
    cache.auto.batch(1024, 512)
    steps()
    assert cache.budget == 0
    assert "another process" in nf4_patch.status().cache.found
    gpu["others"] = GIB
    steps()
    assert cache.budget == 9 * GIB


def test_it_takes_nothing_where_no_more_than_the_margin_is_free(gpu):
    gpu["free"] = GIB
    cache.auto.batch(1024, 512)
    steps()
    assert cache.budget == 0
    gpu["free"] = 3 * GIB
    steps()
    assert cache.budget == 2 * GIB


def test_another_mode_no_longer_follows_the_optimizer(gpu):
    watching, hooks = cache.auto, len(_global_optimizer_post_hooks)
    nf4_patch.enable(cache=f"{GIB}B")
    assert cache.auto is None
    assert len(_global_optimizer_post_hooks) == hooks - 1
    watching.batch(1024, 512)
    steps()
    assert cache.budget == GIB


def test_an_error_of_its_own_stops_no_training(gpu, monkeypatch):
    monkeypatch.setattr(auto.Memory, "of", lambda device: 1 / 0)
    cache.auto.batch(1024, 512)
    steps()
    assert cache.budget == 0
    assert any("ZeroDivisionError" in error for error in nf4_patch.status().errors)


@pytest.mark.parametrize(
    ("x", "size"),
    [(torch.zeros(2, 512, 64), (1024, 512)), (torch.zeros(30, 64), (30, 30)), (torch.zeros(64), (1, 1)),
     (torch.zeros(4, 128, dtype=torch.long), (512, 128)), (torch.zeros((), dtype=torch.long), (1, 1))],
)  # fmt: skip
def test_how_large_a_batch_is(x, size):
    assert auto.size_of(x) == size
