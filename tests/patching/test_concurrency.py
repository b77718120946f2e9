"""Threads, modes and checkpoints around the patched functions. gpu/test_launch.py tests streams and graphs."""

from __future__ import annotations

import functools
import os
import threading

import bitsandbytes.functional as F
import pytest
import torch
from alternation import thinned
from oracle import expected, quantized
from subprocess_python import program, python
from target import TARGET, linear, same, step
from threads import together

import nf4_patch
from nf4_patch.patching.counters import counters


@pytest.mark.gpu  # Triton's interpreter is not made for threads
def test_threads_count_every_hit(device, patched):
    cases = [quantized((64, 64 * (i + 1)), torch.float16, device, seed=i) for i in range(4)]
    wants = [expected(*case) for case in cases]
    counters.reset()

    def work(case, want):
        for _ in range(25):
            assert torch.equal(F.dequantize_4bit(*case), want)

    together(*map(functools.partial, [work] * 4, cases, wants))
    assert counters.hits(TARGET) == 100


def test_toggling_while_others_call(device):
    packed, state = quantized((64, 128), torch.float16, device)
    want = expected(packed, state)
    stop = threading.Event()

    def toggle():
        for _ in range(8):
            nf4_patch.enable()
            nf4_patch.disable()
        stop.set()

    def call():
        while not stop.is_set():
            assert torch.equal(F.dequantize_4bit(packed, state), want)

    together(toggle, call, call)
    assert not hasattr(F.dequantize_4bit, "__wrapped__")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_checkpointing_and_autocast(reentrant, autocast, device, patched):
    layer = linear(device)

    def checkpointed(x):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)

    nf4_patch.disable()
    want = step(checkpointed, device, dtype=torch.float32)
    nf4_patch.enable()
    assert same(step(checkpointed, device, dtype=torch.float32), want)
    assert counters.hits(TARGET) >= 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
def test_grad_modes(mode, device, patched):
    packed, state = quantized((64, 128), torch.float16, device)
    with mode():
        nf4_patch.disable()
        want = expected(packed, state)
        nf4_patch.enable()
        got = expected(packed, state)
        assert torch.equal(got, want)
        assert (got.is_inference(), got.requires_grad) == (want.is_inference(), want.requires_grad)
    again = expected(packed, state)  # what was remembered in one mode holds in the other
    assert torch.equal(again, want)
    assert not again.is_inference()
    assert counters.hits(TARGET) == 2


def test_a_default_device_of_the_user(device, patched):
    packed, state = quantized((64, 128), torch.float16, device)
    want = expected(packed, state)
    with torch.device("meta"):
        assert torch.equal(F.dequantize_4bit(packed, state), want)


def test_status_while_another_thread_meets_a_new_shape(patched, monkeypatch):
    class Meeting:
        """A counter during whose read another thread adds a new shape."""

        addresses: frozenset[int] = frozenset()

        @property
        def hits(self):
            together(lambda: counters.of(TARGET, (len(counters.hit_counters),), "torch.float16"))
            return 1

    monkeypatch.setattr(counters, "hit_counters", {(TARGET, (size,), "float16", ""): Meeting() for size in (-1, -2)})
    assert counters.hits(TARGET) >= 2
    assert nf4_patch.status().hits >= 2


DEFINITION = "def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=64, quant_type='fp4'): ..."


def fake_bitsandbytes(folder, init, functional):
    (folder / "bitsandbytes").mkdir()
    (folder / "bitsandbytes" / "__init__.py").write_text(init)
    (folder / "bitsandbytes" / "functional.py").write_text(functional)


@pytest.mark.parametrize("halfway", ["before", "after"])
def test_enable_while_another_thread_is_halfway_through_an_import(halfway, tmp_path):
    """The import of bitsandbytes pauses before or after it defines the function, until enable() was called."""
    parts = ["import gate; gate.halfway.set(); gate.wait()", DEFINITION]
    fake_bitsandbytes(tmp_path, "from . import functional", "\n".join(parts if halfway == "before" else parts[::-1]))
    (tmp_path / "gate.py").write_text(
        "import threading, time; halfway = threading.Event(); wait = lambda: time.sleep(0.4)"
    )
    program("halfway_import", path=tmp_path)


def test_enable_inside_the_import_of_the_same_thread(tmp_path):
    """bitsandbytes' entry points do this. enable() must not wait for the import that calls it."""
    fake_bitsandbytes(tmp_path, "from . import functional; import nf4_patch; nf4_patch.enable()", DEFINITION)
    code = "import bitsandbytes.functional as F; assert hasattr(F.dequantize_4bit, '__wrapped__'), F.dequantize_4bit"
    python(code, path=tmp_path)


ENABLE = "if not os.environ.get('FAILED'): import nf4_patch; nf4_patch.enable()"
HALFWAY = {
    "before it": (ENABLE, "import torch", DEFINITION),
    "after it": (DEFINITION, ENABLE),
    "in the middle": (DEFINITION, ENABLE, "stock = dequantize_4bit", DEFINITION),
}


@pytest.mark.full
@pytest.mark.parametrize("when", thinned(HALFWAY, 3))
def test_enable_inside_the_import_of_the_very_module(when, tmp_path):
    """The target is installed when this import ends, over the function that the module then has.

    If the import fails, the next import installs it.
    """
    fails = "if not os.environ.setdefault('FAILED', ''): os.environ['FAILED'] = '1'; raise KeyError('halfway')"
    fake_bitsandbytes(tmp_path, "", "\n".join(("import os", *HALFWAY[when], fails)))
    code = """
        import sys, nf4_patch
        try:
            import bitsandbytes.functional
        except KeyError:
            assert "bitsandbytes.functional" not in sys.modules
        import bitsandbytes.functional as F
        row = nf4_patch.status().targets[0]
        assert (row.name, row.state) == ("bitsandbytes.functional.dequantize_4bit", "patched"), row
        stock = F.dequantize_4bit.__wrapped__
        assert not hasattr(stock, "__wrapped__")
        assert not [row for row in nf4_patch.status().targets if row.state == "refused"]
        assert type(F.__spec__).__name__ == "ModuleSpec" and not F.__spec__._initializing
        nf4_patch.disable()
        assert F.dequantize_4bit is stock
    """
    assert not python(code, path=tmp_path, fresh=True).stderr  # torch is not imported yet


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_is_forked_while_a_lock_is_held():
    program("forked")
