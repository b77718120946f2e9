"""The fuzzer itself, and a small run of it under the interpreter; tens of thousands run on the GPU (gpu/test_gpu_fuzz.py)."""

from __future__ import annotations

import fuzz as fuzzing
import pytest
import torch
from fuzz import PADDING, draw, random_state
from hypothesis import given, settings
from hypothesis import strategies as st

import nf4_patch
from nf4_patch.nf4.weight import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.tools.patch import patch

pytestmark = pytest.mark.usefixtures("every_launch_interpreted")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.full)])
def test_any_case_of_any_seed(examples):
    @settings(deadline=None, max_examples=examples)
    @given(seed=st.integers(0, 2**32), number=st.integers(0, 10**6))
    def fuzz(seed, number):
        fuzzer = fuzzing.Fuzzer(seed, DEVICE)
        fuzzer.run(number)
        assert not fuzzer.report.mismatches, fuzzer.report.mismatches
        assert not fuzzer.report.out_of_bounds, fuzzer.report.out_of_bounds

    fuzz()


@pytest.mark.parametrize("fault", fuzzing.FAULTS)
def test_every_fault_ends_as_its_row_says(fault):
    fuzzer = fuzzing.Fuzzer(3, DEVICE)
    for number, blocksize in enumerate((64, 64, 32, 256)):
        case = draw(3, number, DEVICE.type)._replace(
            fault=fault, nested=True, blocksize=blocksize, shape=(96, 64), start=0, transposed=number % 2 == 1,
            storage=torch.uint8,
        )  # fmt: skip
        packed, state = random_state(case, 3, DEVICE)
        want = fuzzer.original(case, packed, state)
        fuzzer.run_broken(case, packed, state, want)
    assert not fuzzer.report.mismatches, fuzzer.report.mismatches
    assert fuzzer.report.faults or (fault.endswith("freed") and DEVICE.type == "cpu")


def test_the_draw_reaches_every_layout():
    drawn = [draw(0, number, "cuda", faults=list(fuzzing.FAULTS)) for number in range(4000)]
    assert {c.dtype for c in drawn} == set(OUTPUT_DTYPES)
    assert {c.blocksize for c in drawn} == set(BLOCKSIZES)
    assert {c.storage for c in drawn} == set(STORAGE_DTYPES)
    assert {c.offset_dtype for c in drawn} == set(OFFSET_DTYPES)
    assert {len(c.shape) for c in drawn} == {1, 2, 3, 4}
    assert {c.numel % 8 for c in drawn} == set(range(8))
    assert {c.start % 4 for c in drawn} == {0, 1, 2, 3}
    assert {c.fault for c in drawn} == {"", *fuzzing.FAULTS}
    assert {c.into for c in drawn} == {"new", "out", "buffer"}


def test_the_patch_is_on_again_with_its_options():
    with nf4_patch.enabled(matmul="auto"):
        with patch(False):
            assert not nf4_patch.is_enabled()
        assert nf4_patch.is_enabled() and switch.value("matmul") == "auto"


def flipped(packed, result, out):
    """One bit of one element."""
    flat = result.t().reshape(-1) if packed.shape[0] == 1 else result.view(-1)
    flat[-1:].view(torch.uint8)[0] ^= 1
    return result


def spilled(packed, result, out):
    """A byte before ``out``."""
    torch.as_strided(out.view(-1).view(torch.uint8), (1,), (1,), PADDING - 1).zero_()
    return result


@pytest.mark.parametrize(
    ("wrong", "mismatches", "out_of_bounds"),
    [(flipped, 1, 0), (spilled, 0, 1), (lambda packed, result, out: Reason.SIZE_MISMATCH, 1, 0)],
)
def test_a_wrong_kernel_is_seen(wrong, mismatches, out_of_bounds, monkeypatch):
    fuzzer = fuzzing.Fuzzer(0, DEVICE)
    of_state = fuzzer.dequantizer.of_state

    def changed(packed, state, out=None, into_buffer=False):
        return wrong(packed, of_state(packed, state, out, into_buffer), out)

    monkeypatch.setattr(fuzzer.dequantizer, "of_state", changed)
    drawn = (draw(0, number, DEVICE.type, faults=list(fuzzing.FAULTS)) for number in range(100))
    fuzzer.run(next(c.number for c in drawn if c.into == "out" and not (c.transposed or c.fault or c.special)))
    assert (len(fuzzer.report.mismatches), len(fuzzer.report.out_of_bounds)) == (mismatches, out_of_bounds)
    assert fuzzer.report.exit_code == 1
