"""The dequantization that a T4 would run, compared with bitsandbytes on this GPU: PTX for sm_75 with the T4's configuration."""

from __future__ import annotations

import re

import machine_code
import portable
import pytest
import torch
from oracle import DTYPES, layout_of, quantized

from nf4_patch.nf4.dequantize import compilation

pytestmark = pytest.mark.gpu
T4 = (7, 5)
CUDA = torch.device("cuda", 0)


def test_it_is_the_code_and_the_configuration_of_a_t4():
    packed, state = quantized((4096, 1024), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    num_warps = compilation.warps_for(T4, layout.numel())
    variant = compilation.Variant.of(layout, num_warps)
    compiled, _ = portable.load(variant, T4, CUDA)
    assert ".target sm_75" in compiled.kernel.decode()
    assert compiled.kernel[:-1].decode() == machine_code.code_of(variant, T4).ptx
    assert compiled.metadata.num_warps == num_warps
    assert "bf16x2" not in compiled.asm["ptx"]  # the convert that sm_75 lacks


def test_signature_is_what_a_launch_specializes_on():
    """machine_code compiles from types, and a launch compiles from tensors. Both must give the same kernel."""
    here = torch.cuda.get_device_capability()

    def text(compiled):  # less the release of PTX: Inductor sets TRITON_PTXAS_PATH to another ptxas than Triton's
        return re.sub(r"^\.version .*$", "", compiled.asm["ptx"], flags=re.MULTILINE)

    for dtype in DTYPES:
        for nested in (True, False):
            layout = layout_of(*quantized((4096, 1024), dtype, CUDA, nested=nested))
            variant = compilation.Variant.of(layout, compilation.warps_for(here, layout.numel()))
            launched = compilation.kernel_for(variant, CUDA).compiled
            assert text(machine_code.compile_variant(variant, here)) == text(launched)


def test_verify_runs_it():
    """The cases include every pair of an absmax byte and a packed byte."""
    report = portable.verified(T4)
    assert report.exit_code == 0, report.failures[:5]
    assert sum(row["elements"] for row in report.rows) > 10_000_000
    assert any("sm_75" in note for note in report.notes)
