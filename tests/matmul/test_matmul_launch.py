"""The launch of the fused matmul without a GPU: the table of configs, the plans, the compiled kernels and the PTX."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from oracle import layout_of, quantized
from subprocess_python import support

from nf4_patch.matmul import adapter, launch, small_m
from nf4_patch.matmul.tuning import SMALL_M_ROWS, TILE_COUNTS, SmallMConfig
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.weight import PackedWeight

H200 = (9, 0)


def test_table_of_measured_sizes():
    """The table covers every Llama layer up to 64 rows on the H200 and nothing more. It covers no GPU that was not measured."""
    shapes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672)]
    for n, k in shapes:
        for m in (1, 2, 8, 9, 16, 17, 32, 33, 64):
            assert isinstance(launch.config_for(H200, m, n, k), SmallMConfig), (m, n, k)
        assert not any(launch.config_for(H200, m, n, k) for m in (65, 128, 256, 512, 4096)), (n, k)
        assert not any(launch.config_for(other, 1, n, k) for other in ((7, 5), (8, 0), (8, 9), (10, 0), (12, 0)))
    # as measured: dequantize + matmul is faster for small weights past a few rows
    assert launch.config_for(H200, 16, 256, 2048) and not launch.config_for(H200, 17, 256, 2048)
    assert [launch.pays(launch.MIN_ELEMENTS_SHORT_STEP, m, 1024, 4112) for m in (32, 33)] == [True, False]
    assert launch.pays(launch.MIN_ELEMENTS_SHORT_STEP, 64, 4096, 4096)


def test_every_row_is_reached():
    """Each row of the table is used for some size."""
    sizes = itertools.product((1, 16, 64), (1024, 4096, 8192, 14336), (4096, 14336))
    found = {id(launch.config_for(H200, m, n, k)) for m, n, k in sizes}
    assert found == {id(row.config) for row in SMALL_M_ROWS}


def test_every_prompt_length_shares_six_kernels():
    """For 1 to 64 rows of one layer, compiled kernels depend on the number of tiles, not of rows."""
    for n, k in [(4096, 4096), (14336, 4096), (4096, 14336)]:
        plans = [
            small_m.plan(launch.config_for(H200, m, n, k), 132, m, n, k, False, torch.float32, False)
            for m in range(1, 65)
        ]
        found = {(cut.ptx, cut.warps, cut.registers, cut.dependent) for cut in plans}
        assert len(found) <= 6 and len({cut.split_k for cut in plans}) <= 2, (n, k, len(found))


@pytest.mark.parametrize(("release", "driver", "begins_early"), [
    ((3, 6), 12030, {"one CTA"}), ((3, 6), 12020, set()), ((3, 5), 13000, set()), ((3, 6), 0, set()),
])  # fmt: skip
def test_which_launches_begin_while_the_one_before_ends(release, driver, begins_early, monkeypatch):
    """A launch begins early if it is a single launch with one CTA per multiprocessor, on Hopper or newer.

    The driver must be able to capture it.
    """
    monkeypatch.setattr(small_m, "TRITON_RELEASE", release)
    monkeypatch.setattr(small_m, "driver_version", lambda: driver)
    configs = {
        "one CTA": SmallMConfig(1, 1, 16, True, 1),
        "two CTAs": SmallMConfig(1, 1, 8, True, 2),
        "two launches": SmallMConfig(2, 2, 4, False, 1, split_k=True),
    }
    for capability in ((8, 0), (9, 0), (12, 0)):
        plans = {
            name: small_m.plan(config, 132, 8, 4096, 4096, False, torch.float32, False, capability)
            for name, config in configs.items()
        }
        found = {name for name, cut in plans.items() if cut.dependent}
        assert found == (begins_early if capability >= (9, 0) else set()), (capability, found)


def test_plan_covers_every_row_once():
    for row in SMALL_M_ROWS:
        for n in (1, 17, 1000, 4096, 50001):
            for k in (64, 4096, 14336):
                cut = small_m.plan(row.config, 132, row.max_m, n, k, False, torch.float32, False)
                assert 1 <= cut.sm_partitions <= -(-n // row.config.block_n)
                assert cut.ctas % (cut.sm_partitions * cut.split_k) == 0
                assert cut.split_k <= -(-k // 256)


def test_what_is_supported(monkeypatch):
    """bf16 needs sm_80. K must be a multiple of the step, with blocks that may span rows. Packed bytes must be 16-byte aligned."""
    device = torch.device("cpu")
    x = SimpleNamespace(device=device, numel=lambda: 4096, is_neg=lambda: False)
    packed = SimpleNamespace(device=device, data_ptr=lambda: 256)
    layout = PackedWeight(packed, None, None, None, None, 64, 0, (4096, 4096), None, "nf4")

    def supported(dtype, capability, k=4096, blocksize=64, start=256, bias=None):
        packed.data_ptr = lambda: start
        x.dtype = dtype
        monkeypatch.setattr(runtime, "capability_of", lambda device: capability)
        return launch.supports(x, layout._replace(shape=(4096, k), blocksize=blocksize), bias)

    assert not supported(torch.bfloat16, (7, 5)) and not supported(torch.float32, (9, 0))
    assert supported(torch.bfloat16, (8, 0)) and supported(torch.float16, (7, 5))
    for k, blocksize in ((4160, 256), (4128, 32), (4112, 64), (4096, 32)):
        assert supported(torch.float16, (9, 0), k, blocksize) and not supported(torch.float16, (9, 0), k + 8, blocksize)
    assert not supported(torch.float16, (9, 0), start=264) and supported(torch.float16, (9, 0), start=272)
    odd = torch.zeros(4097, dtype=torch.float16)[1:]  # starts on 2 bytes
    for bias in (torch.zeros(4096), odd[:4095].clone(), odd, odd.to("meta")):
        assert not supported(torch.float16, (9, 0), bias=bias)
    assert supported(torch.float16, (9, 0), bias=odd.clone())
    x.device = torch.device("cuda", 0)
    assert not supported(torch.float16, (9, 0))
    x.device = device
    x.is_neg = lambda: True  # its memory is the negative of what it shows
    assert not supported(torch.float16, (9, 0))


def test_which_adapters_are_supported():
    def supported(
        a=(8, 64), b=(32, 8), of_a=torch.bfloat16, of_b=torch.bfloat16, of_x=torch.bfloat16, m=4, place="cpu"
    ):
        x = torch.empty(m, 64, dtype=of_x)
        return adapter.supports(x, m, 32, torch.empty(a, dtype=of_a, device=place), torch.empty(b, dtype=of_b))

    fp32 = {"of_a": torch.float32, "of_b": torch.float32}
    assert (
        supported() and supported(**fp32) and supported((128, 64), (32, 128)) and supported((64, 64), (32, 64), **fp32)
    )
    assert not supported((128, 64), (32, 128), **fp32) and not supported((132, 64), (32, 132))
    for shapes in [
        ((8, 48), (32, 8)), ((8, 64), (16, 8)), ((8, 64), (32, 4)), ((6, 64), (32, 6)), ((0, 64), (32, 0)),
        ((8, 64, 1), (32, 8)), ((8, 64), (32, 8, 1)),
    ]:  # fmt: skip
        assert not supported(*shapes), shapes
    assert not supported(of_a=torch.float32) and not supported(of_a=torch.float16, of_b=torch.float16)
    assert not supported(of_x=torch.float16) and not supported(place="meta") and not supported(m=65)


def test_which_factors_the_kernels_can_read():
    factor = torch.zeros(8, 64, dtype=torch.bfloat16)
    freed = factor.clone()
    freed.untyped_storage().resize_(0)
    odd = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    found = [adapter.is_readable(each) for each in (factor, odd, factor.t(), torch._neg_view(factor), freed)]
    assert found == [True, False, False, False, False]


def test_what_is_asked_of_the_compiler(monkeypatch):
    """For more than one tile of X, the compiler may use all 255 registers. The kernel may start before the previous one ends."""
    asked = []
    monkeypatch.setattr(small_m, "compiled", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(small_m, "TRITON_RELEASE", (3, 6))
    monkeypatch.setattr(small_m, "driver_version", lambda: 13000)
    layout = layout_of(*quantized((4096, 512), torch.bfloat16, "cpu"))
    sizes = {8: (16, None), 24: (8, 255)}
    for m, (warps, _) in sizes.items():
        cut = small_m.plan(launch.config_for(H200, m, 4096, 512), 132, m, 4096, 512, False, torch.float32, False)
        assert cut.warps == warps
        small_m.SmallMKernel(torch.device("cpu"), torch.bfloat16, layout, cut, m, False)
    wanted = [{"num_warps": warps, "maxnreg": registers, "launch_pdl": True} for warps, registers in sizes.values()]
    assert asked == wanted


@pytest.mark.full
def test_every_row_compiles_for_every_gpu():
    """ptxas compiles every row's PTX for sm_80 and newer, and every candidate's for sm_75.

    Only code for more than 56 rows of X uses local memory. That code needs all 255 registers, and spills up to 24 bytes
    on GPUs newer than Hopper, but none on Hopper (Triton 3.7.1). Steps of 32 and 16 weights, which no model of the
    table has, may spill up to 72 bytes.
    """
    lines = [line.split() for line in support("compile_fused_matmul")]
    assert {int(line[0]) for line in lines} == {75, 80, 86, 89, 90, 100, 120}
    assert sum(line[0] == "75" for line in lines) == 3 * (2 + len(TILE_COUNTS)) + 2 * 2  # both offsets of 16 bits
    assert sum(line[0] == "90" for line in lines) >= 4 * len(SMALL_M_ROWS)
    for arch, registers, stack, shared, name in lines:
        assert int(shared) <= 48 * 1024, name
        assert int(registers) <= 255, name
        allowed = 72 if re.search(":(16|32)-", name) else 24 if name.startswith("x:64x") and int(arch) > 90 else 0
        assert int(stack) <= allowed, (arch, name, "spills")
