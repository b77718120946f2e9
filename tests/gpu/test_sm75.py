"""The code that a T4 would run, run here: PTX built for sm_75 with the T4's configuration, against bitsandbytes."""

from __future__ import annotations

import math
import re

import bitsandbytes.functional as F
import machine_code
import matmul_elsewhere
import portable
import pytest
import torch
from fused_matmul import error, exact, one_hot, unfused_error
from matmul_emulation import in_order
from oracle import DTYPES, every_pair, layout_of, quantized

from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import compilation, reference
from nf4_patch.nf4.matmul import small_m
from nf4_patch.nf4.matmul.tuning import SMALL_M_CANDIDATES

pytestmark = pytest.mark.gpu
T4 = (7, 5)
PROCESSORS = 40  # of a T4: how its launch is cut
CUDA = torch.device("cuda", 0)


def check(packed, state):
    want = F.dequantize_4bit(packed, state)
    out = torch.full(tuple(state.shape), math.nan, dtype=state.dtype, device=CUDA)
    assert runtime.same_bits(portable.dequantize(layout_of(packed, state), T4, out), want)
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", [32, 64, 512])
def test_every_absmax_byte_with_every_packed_byte(dtype, blocksize):
    check(*every_pair(dtype, CUDA, blocksize))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_random_weights_with_tails(dtype, nested, quant_type):
    for blocksize in (32, 64, 128, 4096):
        for shape in ((4096, 1024), (33, 77), (5,), (1, 1), (129, 8), (3, 7, 64), (4097,)):
            check(*quantized(shape, dtype, CUDA, blocksize, nested, quant_type))


def test_it_is_the_code_and_the_configuration_of_a_t4():
    packed, state = quantized((4096, 1024), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    config = compilation.config_for(T4, layout.numel())
    variant = compilation.Variant.of(layout, config)
    compiled, _ = portable.load(variant, T4, CUDA)
    assert ".target sm_75" in compiled.kernel.decode()
    assert compiled.kernel[:-1].decode() == machine_code.code_of(variant, T4).ptx
    assert compiled.metadata.num_warps == config.num_warps
    assert "bf16x2" not in compiled.asm["ptx"]  # the convert that sm_75 lacks


def test_signature_is_what_a_launch_specializes_on():
    """machine_code compiles from compilation.signature; a launch from its tensors: the same kernel must come out."""
    here = torch.cuda.get_device_capability()

    def text(compiled):  # less the release of PTX: Inductor sets TRITON_PTXAS_PATH to another ptxas than Triton's
        return re.sub(r"^\.version .*$", "", compiled.asm["ptx"], flags=re.MULTILINE)

    for dtype in DTYPES:
        for nested in (True, False):
            layout = layout_of(*quantized((4096, 1024), dtype, CUDA, nested=nested))
            variant = compilation.Variant.of(layout, compilation.config_for(here, layout.numel()))
            launched = compilation.kernel_for(variant, CUDA).compiled
            assert text(machine_code.compile_variant(variant, here)) == text(launched)


def test_verify_runs_it():
    report = portable.verified(T4)
    assert report.exit_code == 0, report.failures[:5]
    assert report.elements > 10_000_000
    assert any("sm_75" in note for note in report.notes)


@pytest.fixture(params=SMALL_M_CANDIDATES, ids=lambda row: "-".join(map(str, row.config)))
def candidate(request):
    assert request.param.capability == T4
    return request.param


def multiply(x, layout, config, bias=None):
    """What a T4 would launch, into NaN; the memory that the sums of slices are likely to get holds NaN too."""
    out = torch.full((x.shape[0], layout.shape[0]), math.nan, dtype=torch.float16, device=CUDA)
    torch.full((PROCESSORS * out.numel(),), math.nan, device=CUDA)
    return matmul_elsewhere.multiply(x, layout, config, PROCESSORS, T4, out, bias)


def rows_up_to(m):
    return [rows for rows in (1, 3, 8, 9, 16, 17, 31, 40, 64) if rows <= m]


# (N, K, blocksize): tails of N in a tile and in a CTA's rows, of K in a chunk and in a warp's share; slices of K and none.
SIZES = (
    (256, 1024, 64), (250, 320, 64), (1003, 4096, 64), (777, 4160, 64), (5001, 2048, 128), (130, 4096, 4096),
    (4003, 4416, 64), (96, 64, 64), (8, 512, 256), (1, 128, 64),
)  # fmt: skip


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_one_hot_rows_return_the_bits_of_dequantize(candidate, quant_type, nested):
    for n, k in ((1003, 4096), (4096, 1024), (520, 8192)):
        packed, state = quantized((n, k), torch.float16, CUDA, nested=nested, quant_type=quant_type)
        want = F.dequantize_4bit(packed, state)
        for m in rows_up_to(candidate.m):
            columns = torch.randperm(k, device=CUDA)[:m]
            x = one_hot(columns, k, torch.float16)
            assert torch.equal(multiply(x, layout_of(packed, state), candidate.config), want[:, columns].t()), (n, k, m)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_the_fused_matmul_has_the_bits_of_its_emulation(candidate, nested):
    """1 to 64 rows: every sum in the order of the PTX, with the tensor cores of the H200 as tests/support/ptx_simulator.py has them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("what a tensor core does below fp32's last bit is modelled for an H200")
    torch.manual_seed(0)
    for n, k, blocksize in SIZES[:4] if nested else SIZES[4:]:
        packed, state = quantized((n, k), torch.float16, CUDA, blocksize, nested)
        layout = layout_of(packed, state)
        x, bias = torch.randn(candidate.m, k, device=CUDA).half(), torch.randn(n, device=CUDA).half()
        split_k = small_m.plan(candidate.config, PROCESSORS, 1, n, k, True, nested, True, T4).split_k
        want = in_order(x, reference.dequantize(layout), candidate.config, split_k, bias)
        for m in range(1, candidate.m + 1):
            assert torch.equal(multiply(x[:m], layout, candidate.config, bias), want[:m]), (n, k, m, split_k)


def test_small_integers_are_exact(candidate):
    """Weights and X of -1, 0 and 1: no sum is rounded whatever the tensor cores do, so this holds for a T4's as well."""
    for n, k in ((1003, 4096), (96, 14336), (4003, 448)):
        packed, state = quantized((n, k), torch.float16, CUDA, nested=False)
        state.code = (torch.arange(16, device=CUDA) % 3 - 1).float()
        state.absmax = torch.ones_like(state.absmax)
        layout = layout_of(packed, state)
        x = torch.randint(-1, 2, (candidate.m, k), device=CUDA).half()
        want = x.double() @ reference.dequantize(layout).double().t()
        assert 20 < want.abs().max() <= 2048
        for m in rows_up_to(candidate.m):
            assert torch.equal(multiply(x[:m], layout, candidate.config).double(), want[:m]), (n, k, m)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_as_accurate_as_dequantize_and_matmul_and_the_same_again(candidate, nested):
    torch.manual_seed(0)
    missed = []
    for seed, (n, k, blocksize) in enumerate(SIZES):
        packed, state = quantized((n, k), torch.float16, CUDA, blocksize, nested, seed=seed)
        layout = layout_of(packed, state)
        truth_weight = exact(layout)
        for m in rows_up_to(candidate.m):
            x = torch.randn(m, k, device=CUDA).half()
            bias = torch.randn(n, device=CUDA).half() if m % 2 else None
            truth = x.double() @ truth_weight.t() + (0 if bias is None else bias.double())
            got, again = (multiply(x, layout, candidate.config, bias) for _ in range(2))
            theirs = unfused_error(x, layout, truth, bias)
            if not (error(got, truth) <= 1.01 * theirs and torch.equal(got, again)):
                missed.append((n, k, blocksize, m, error(got, truth), theirs, torch.equal(got, again)))
    assert not missed, missed


def test_the_fused_matmul_is_the_code_of_a_t4(candidate):
    cut = small_m.plan(candidate.config, PROCESSORS, 16, 4096, 4096, True, True, False, T4)
    compiled, _ = matmul_elsewhere.load(cut.ptx, candidate.config.warps_n * candidate.config.warps_k, T4, CUDA)
    ptx = compiled.kernel.decode()
    assert ".target sm_75" in ptx
    assert "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in ptx
    assert not re.search("m16n8k16|mbarrier|f16x2", ptx)
