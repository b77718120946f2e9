"""The fused matmul of hundreds of rows without its GPU: the decode on the simulator, the partitions, the table, the compiler."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from oracle import layout_of, quantized
from ptx_simulator import Cta, Source, Warp, memory_of, u64
from subprocess_python import support

from nf4_patch.nf4 import runtime
from nf4_patch.nf4.codes import code_of
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.matmul import hopper, launch
from nf4_patch.nf4.matmul.tuning import HOPPER_ROWS, SMALL_M_ROWS

H200 = (9, 0)
pytestmark = pytest.mark.skipif(hopper.RELEASE < (3, 6), reason="Triton without this Gluon")


@pytest.fixture
def proven_release(monkeypatch):
    """Whatever Triton is installed here, the table is asked as on one that the kernel ran on."""
    monkeypatch.setattr(hopper, "RELEASE", hopper.RELEASES[0])


def decoded(source, words, scales, code):
    """The registers of 32 lanes, [32, 8 words, 4] of two weights each: words and fp32 scales [32, 8], code [16]."""
    warp = Warp(Cta(source, {48: 1 << 32}, 0, 1, 1, [memory_of(code)]), 0)
    inputs = [*words.T, *scales.contiguous().view(torch.int32).T]
    warp.registers |= {f"${i}": u64(values.numpy().view(np.uint32)) for i, values in enumerate(inputs, 32)}
    assert not list(warp.run())
    registers = np.stack([warp.get(f"${i}") for i in range(32)], 1).astype(np.uint32)
    return torch.from_numpy(registers.view(np.int32)).view(32, 4, 8).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_decode_gives_the_bits_of_dequantize(quant_type, nested, dtype):
    n, k = 128, 512
    layout = layout_of(*quantized((n, k), dtype, "cpu", 64, nested, quant_type))
    layout = layout._replace(packed=torch.randperm(n * k // 2).remainder(256).to(torch.uint8).view(-1, 1))
    want = reference.dequantize(layout).view(torch.int16)
    words = layout.packed.view(-1).view(torch.int32).view(n // 32, 32, k // 64, 8)
    scales = reference.block_scales(layout, False).repeat_interleave(8).view(n // 32, 32, k // 64, 8)
    source = Source(hopper.decode_ptx({torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]))
    source.types |= {f"${i}": ".b32" for i in range(32)}
    code = code_of(quant_type, layout.packed.device)
    for warp, step in itertools.product(range(n // 32), range(k // 64)):
        got = decoded(source, words[warp, :, step], scales[warp, :, step], code)
        got = got.contiguous().view(torch.int16).view(32, 64)
        wanted = want[32 * warp : 32 * warp + 32, 64 * step : 64 * step + 64]
        zeros = wanted.bitwise_and(0x7FFF) == 0  # FP4's minus zero: invisible in a sum
        assert torch.equal(got.masked_fill(zeros, 0), wanted.masked_fill(zeros, 0))


def work_ranges(plan, steps):
    """[start, end) of every CTA, as the kernel's work_range() has them, by turn."""

    def start_of(turn):
        chunk = plan.tiles * plan.split_k * turn // plan.ctas
        return chunk // plan.split_k * steps + chunk % plan.split_k * steps // plan.split_k

    return [(start_of(turn), start_of(turn + 1)) for turn in range(plan.ctas)]


@pytest.mark.parametrize("row", HOPPER_ROWS, ids=lambda row: "-".join(map(str, row.config)))
def test_every_tile_is_covered_once_and_split_as_its_first_cta_expects(row):
    assert row.config.stages % 2 == 0 and row.config.decoded >= 2  # see HopperConfig
    widths, depths = (8, 136, 1000, 4096, 8192, 11008, 14336, 28672, 50000), (64, 128, 320, 4096, 5120, 11008, 14336)
    for n, k, m, processors in itertools.product(widths, depths, (row.min_m, row.max_m), (78, 114, 132)):
        plan = hopper.HopperPlan.of(row.config, processors, m, n, k)
        steps = k // 64
        parts = work_ranges(plan, steps)
        assert plan.tiles == -(-m // row.config.block_m) * -(-n // 128)
        assert 1 <= plan.ctas <= processors and 0 < plan.fill(processors) <= 1
        assert parts[0][0] == 0 and parts[-1][1] == plan.tiles * steps
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        for turn, (start, end) in enumerate(parts):
            assert start < end
            if plan.split_k == 1:
                assert start % steps == end % steps == 0
            else:  # turn's tile, its chunk; the first one's CTA waits for turn + 1 .. + splits - 1
                assert turn // plan.split_k == start // steps == (end - 1) // steps
                assert (turn % plan.split_k == 0) == (start % steps == 0)


def test_the_table_has_what_was_measured_and_nothing_else(proven_release):
    def rows(n, k, block_m):
        measured = (64, 65, 128, 129, 159, 160, 256, 257, 448, 449, 512, 513, 1024)
        return [m for m in measured if (config := hopper.config_for(H200, m, n, k)) and config.block_m == block_m]

    for shape in ((14336, 4096), (4096, 14336), (28672, 8192)):
        assert (rows(*shape, 128), rows(*shape, 256)) == ([65, 128], [160, 256, 449, 512])
    for shape in ((11008, 4096), (5120, 5120)):  # too few multiprocessors at work, or too small, for 256
        assert rows(*shape, 128) + rows(*shape, 256) == [65, 128]
    # too small; TMA writes 16 bytes at least; a step of K has one scale
    for shape in ((4096, 4096), (14336 + 4, 4096), (14336, 4096 + 32)):
        assert not rows(*shape, 128) + rows(*shape, 256)
    assert hopper.config_for((8, 0), 128, 14336, 4096) is None
    assert launch.config_for(H200, 64, 14336, 4096) in [row.config for row in SMALL_M_ROWS]
    assert launch.first_config(SMALL_M_ROWS, H200, 128, 14336, 4096) is None
    calibrated = ((8, None), (64, None))  # a calibration measures up to 64 rows
    found = [launch.config_for(H200, m, 14336, 4096, calibrated=calibrated) for m in (8, 64, 128)]
    assert found == [None, None, HOPPER_ROWS[0].config]


def test_each_type_of_offset_has_code_of_its_own(monkeypatch):
    """Shared, the second one's bytes were read as the first one's type (H200)."""
    asked = []
    monkeypatch.setattr(runtime, "compiled", lambda kernel, _, values, warps, *kind: asked.append((id(kernel), kind)))
    offsets = (None, torch.float32, torch.float16, torch.bfloat16)
    for offset in offsets:
        hopper.compiled(HOPPER_ROWS[0].config, torch.device("cpu"), torch.bfloat16, offset, False)
    assert len(set(asked)) == len(offsets) + 1  # and one matmul


@pytest.mark.parametrize("release", [(3, 5), (3, 8)])
def test_a_release_of_triton_on_which_nothing_ran_has_no_row(release, monkeypatch):
    monkeypatch.setattr(hopper, "RELEASE", release)
    assert hopper.config_for(H200, 128, 14336, 4096) is None


@pytest.mark.full
def test_it_compiles_to_asynchronous_wgmma_within_shared_memory():
    """ptxas waits for every single wgmma, four times slower, where it finds too few registers; it says so."""
    lines = [line.split() for line in support("compile_hopper")]
    assert len(lines) == 4
    for block_m, shared, serialized, wgmmas in lines:
        assert int(shared) <= 227 * 1024, block_m
        assert serialized == "False", block_m
        assert int(wgmmas) == 2 * 4 * (2 if block_m == "256" else 1), block_m
