"""The fuzzer itself, and a small run of it in the interpreter. gpu/test_gpu_fuzz.py runs tens of thousands of cases."""

from __future__ import annotations

import pytest
import torch
from fuzz import FAULTS, PADDING, Fuzzer, drawn, random_state, states
from hypothesis import given, settings

import nf4_patch
from nf4_patch.patching import guards
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.tools.patch import patch

pytestmark = pytest.mark.usefixtures("every_launch_interpreted")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.mark.full
@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.full)])
def test_any_state(examples):
    @settings(deadline=None, max_examples=examples)
    @given(states(DEVICE.type, faults=tuple(FAULTS)))
    def fuzz(case):
        fuzzer = Fuzzer(DEVICE)
        fuzzer.run(case)
        assert not fuzzer.report.mismatches, fuzzer.report.mismatches
        assert not fuzzer.report.out_of_bounds, fuzzer.report.out_of_bounds

    fuzz()


WELL_FORMED = drawn(4, 3, states(DEVICE.type))


@pytest.mark.every(2)
def test_every_guard_has_a_fault():
    """Only guards that refuse a whole GPU have no fault."""
    named = {name for _, _, names in FAULTS.values() for name in names}
    assert named >= {reason.name for reason, _ in guards.GUARDS} - {"ROCM", "GPU_TOO_OLD"}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_ends_as_its_row_says(fault):
    fuzzer = Fuzzer(DEVICE)
    for number, blocksize in enumerate((64, 64, 32, 256)):
        case = WELL_FORMED[number]._replace(
            fault=fault, nested=True, blocksize=blocksize, shape=(96, 64), start=0, transposed=number % 2 == 1,
            storage=torch.uint8,
        )  # fmt: skip
        packed, state = random_state(case, DEVICE)
        want = fuzzer.original(case, packed, state)
        fuzzer.run_broken(case, packed, state, want)
    assert not fuzzer.report.mismatches, fuzzer.report.mismatches
    assert fuzzer.report.faults or (fault.endswith("freed") and DEVICE.type == "cpu")


def test_the_patch_is_on_again_with_its_options():
    with nf4_patch.enabled(matmul="auto"):
        with patch(False):
            assert not nf4_patch.is_enabled()
        assert nf4_patch.is_enabled() and switch.value("matmul") == "auto"


def flipped(packed, result, out):
    """Change one bit of one element."""
    flat = result.t().reshape(-1) if packed.shape[0] == 1 else result.view(-1)
    flat[-1:].view(torch.uint8)[0] ^= 1
    return result


def spilled(packed, result, out):
    """Change a byte before ``out``."""
    torch.as_strided(out.view(-1).view(torch.uint8), (1,), (1,), PADDING - 1).zero_()
    return result


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("wrong", "mismatches", "out_of_bounds"),
    [(flipped, 1, 0), (spilled, 0, 1), (lambda packed, result, out: Reason.SIZE_MISMATCH, 1, 0)],
)
def test_a_wrong_kernel_is_seen(wrong, mismatches, out_of_bounds, monkeypatch):
    fuzzer = Fuzzer(DEVICE)
    of_state = fuzzer.dequantizer.of_state

    def changed(packed, state, out=None, into_buffer=False):
        return wrong(packed, of_state(packed, state, out, into_buffer), out)

    monkeypatch.setattr(fuzzer.dequantizer, "of_state", changed)
    found = drawn(100, 0, states(DEVICE.type))
    fuzzer.run(next(case for case in found if case.into == "out" and not (case.transposed or case.special)))
    assert (len(fuzzer.report.mismatches), len(fuzzer.report.out_of_bounds)) == (mismatches, out_of_bounds)
    assert fuzzer.report.exit_code == 1
