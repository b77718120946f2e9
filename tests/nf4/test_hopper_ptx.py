"""The fused matmul of hundreds of rows without its GPU: the decode in numpy, the partitions, the table, the compiler."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from oracle import layout_of, quantized
from subprocess_python import python

from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.matmul import calibration, hopper, launch
from nf4_patch.nf4.matmul.tuning import HOPPER_ROWS, SMALL_M_ROWS

H200 = (9, 0)
pytestmark = pytest.mark.skipif(hopper.RELEASE < (3, 6), reason="Triton without this Gluon")


@pytest.fixture
def proven_release(monkeypatch):
    """Whatever Triton is installed here, the table is asked as on one that the kernel ran on."""
    monkeypatch.setattr(hopper, "RELEASE", hopper.RELEASES[0])


def permuted(a, b, selector):
    """prmt.b32, with the sign-replicating mode of a selector's highest bit."""
    by = [np.uint32(value >> shift & 0xFF) for value in (a, b) for shift in (0, 8, 16, 24)]
    out = np.zeros_like(a)
    for i in range(4):
        choice = selector >> (4 * i) & 15
        value = np.choose(choice & 7, by)
        out |= np.where(choice & 8, np.where(value & 0x80, np.uint32(0xFF), np.uint32(0)), value) << (8 * i)
    return out


def evaluated(ptx, words, scales, codes, dtype):
    """The 32 registers of every lane: words [8, lanes] uint32, scales [lanes] fp32, codes [16] fp32."""
    lanes = scales.size
    known = {f"${32 + i}": words[i] for i in range(8)} | {"$40": scales}
    body = ptx.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (line.strip() for line in body.replace("\n", " ").split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        if name == "ld.global.nc.v4.f32":
            registers, start = re.fullmatch(r"\{(.*)\}, \[\$48 \+ (\d+)\]", rest).groups()
            for i, register in enumerate(registers.split(", ")):
                known[register] = np.full(lanes, codes[int(start) // 4 + i], np.float32)
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [known[s] if s in known else np.full(lanes, int(s, 0), np.uint32) for s in sources]
        kind = name.split(".")[0]
        if name == "mul.rn.ftz.f32":
            result = values[0] * values[1]
        elif kind == "cvt":
            high, low = (torch.from_numpy(value).to(dtype).view(torch.int16).numpy() for value in values)
            result = low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16
        elif kind == "prmt":
            result = permuted(*values)
        elif kind == "lop3":
            assert sources[3] == "0xCA"
            result = values[0] & values[1] | ~values[0] & values[2]
        else:
            result = {"and": np.bitwise_and, "shl": np.left_shift, "shr": np.right_shift}[kind](*values)
        known[target] = result
    return [known[f"${i}"] for i in range(32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_decode_gives_the_bits_of_dequantize(quant_type, nested, dtype):
    n, k = 128, 512
    layout = layout_of(*quantized((n, k), dtype, "cpu", 64, nested, quant_type))
    layout = layout._replace(packed=torch.randperm(n * k // 2).remainder(256).to(torch.uint8).view(-1, 1))
    want = reference.dequantize(layout).view(torch.int16)
    words = layout.packed.view(-1).view(torch.int32).view(n, k // 8).numpy().view(np.uint32)
    scales = reference.block_scales(layout, False).view(n, k // 64).numpy()
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    for step in range(k // 64):
        lanes = words[:, 8 * step : 8 * step + 8].T.copy()
        registers = evaluated(hopper.decode(name), lanes, scales[:, step].copy(), layout.code.numpy(), dtype)
        got = np.stack([np.stack(registers[word::8], 1) for word in range(8)], 1).reshape(n, 32)
        zeros = want[:, 64 * step : 64 * step + 64].bitwise_and(0x7FFF) == 0  # FP4's minus zero: invisible in a sum
        got = torch.from_numpy(got.view(np.int16))
        assert torch.equal(got.masked_fill(zeros, 0), want[:, 64 * step : 64 * step + 64].masked_fill(zeros, 0))


def shares(plan, steps):
    """[start, end) of every CTA, as the kernel's partition() has them, by turn."""

    def start_of(chunk):
        return chunk // plan.splits * steps + chunk % plan.splits * steps // plan.splits

    chunks = plan.tiles * plan.splits
    return [
        (start_of(chunks * turn // plan.ctas), start_of(chunks * (turn + 1) // plan.ctas)) for turn in range(plan.ctas)
    ]


def test_every_tile_is_covered_once_and_split_as_its_first_cta_expects():
    for row in HOPPER_ROWS:
        assert row.config.stages % 2 == 0 and row.config.decoded >= 2  # see HopperConfig
        for n in (8, 136, 1000, 4096, 8192, 11008, 14336, 28672, 50000):
            for k in (64, 128, 320, 4096, 5120, 11008, 14336):
                for m in (row.least, row.most):
                    for processors in (78, 114, 132):
                        plan = hopper.Plan.of(row.config, processors, m, n, k)
                        steps = k // 64
                        parts = shares(plan, steps)
                        assert plan.tiles == -(-m // row.config.rows) * -(-n // 128)
                        assert 1 <= plan.ctas <= processors
                        assert parts[0][0] == 0 and parts[-1][1] == plan.tiles * steps
                        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
                        assert all(start < end for start, end in parts)
                        for turn, (start, end) in enumerate(parts):
                            if plan.splits == 1:
                                assert start % steps == end % steps == 0
                            else:  # turn's tile, its chunk; the first one's CTA waits for turn + 1 .. + splits - 1
                                assert turn // plan.splits == start // steps == (end - 1) // steps
                                assert (turn % plan.splits == 0) == (start % steps == 0)
                        assert 0 < plan.fill(processors) <= 1


def test_the_table_has_what_was_measured_and_nothing_else(proven_release):
    found = {}
    for n, k in ((14336, 4096), (4096, 14336), (11008, 4096), (5120, 5120), (4096, 4096), (28672, 8192)):
        for m in (64, 65, 128, 129, 159, 160, 256, 257, 448, 449, 512, 513, 1024):
            config = hopper.config_for(H200, m, n, k)
            found[n, k, m] = config and config.rows
    for shape in ((14336, 4096), (4096, 14336), (28672, 8192)):
        expected = {65: 128, 128: 128, 160: 256, 256: 256, 449: 256, 512: 256}
        assert {m: rows for (*size, m), rows in found.items() if tuple(size) == shape and rows} == expected
    for shape in ((11008, 4096), (5120, 5120)):  # too few multiprocessors at work, or too small, for 256
        assert {m for (*size, m), rows in found.items() if tuple(size) == shape and rows} == {65, 128}
    assert not any(rows for (*size, _), rows in found.items() if size == [4096, 4096])
    assert hopper.config_for((8, 0), 128, 14336, 4096) is None
    assert hopper.config_for(H200, 128, 14336 + 4, 4096) is None  # TMA writes 16 bytes at least
    assert launch.config_for(H200, 128, 14336, 4096) == HOPPER_ROWS[0].config
    assert launch.config_for(H200, 64, 14336, 4096) in [row.config for row in SMALL_M_ROWS]
    assert launch.config_for(H200, 128, 14336, 4096, SMALL_M_ROWS) is None  # calibrate's candidates


def test_a_calibration_decides_up_to_its_last_row(proven_release, monkeypatch):
    """It measures up to 64 rows; past them the shipped table stands."""
    monkeypatch.setattr(calibration, "rows", lambda device: {(14336, 4096): ((8, None), (64, None))})
    assert launch.config_for(H200, 64, 14336, 4096) is None
    assert launch.config_for(H200, 128, 14336, 4096) == HOPPER_ROWS[0].config
    assert launch.config_for(H200, 64, 4096, 4096) is not None


@pytest.mark.parametrize("release", [(3, 5), (3, 7)])
def test_a_release_of_triton_on_which_nothing_ran_has_no_row(release, monkeypatch):
    monkeypatch.setattr(hopper, "RELEASE", release)
    assert hopper.config_for(H200, 128, 14336, 4096) is None


@pytest.mark.full
def test_it_compiles_to_asynchronous_wgmma_within_shared_memory():
    """ptxas waits for every single wgmma, four times slower, where it finds too few registers; it says so."""
    done = python("""
import subprocess, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.matmul import hopper
from nf4_patch.nf4.matmul.hopper_kernels import hopper_kernel as kernel
from nf4_patch.nf4.matmul.tuning import HOPPER_ROWS
from nf4_patch.tools.sass.machine_code import tool

types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.float32: "fp32"}
for config in {row.config for row in HOPPER_ROWS}:
    for dtype, bias in ((torch.bfloat16, False), (torch.float16, True)):
        boxes = hopper.boxes(config.rows, dtype)
        kinds = [f"tensordesc<{types[kind]}{box},{layout!r}>" for box, layout, kind in boxes]
        kinds += ["*fp32", "*i32", "*fp32", "*" + types[dtype], *["i32"] * 5, *["constexpr"] * 6]
        names = kernel.arg_names
        values = {"ROWS": config.rows, "STAGES": config.stages, "DECODED": config.decoded, "BIAS": bias}
        values |= {"PTX": hopper.decode(compilation.PTX_TYPES[dtype]), "CONSTRAINTS": hopper.CONSTRAINTS}
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("sums", "flags", "code", "bias")}
        source = GluonASTSource(kernel, dict(zip(names, kinds)), {(names.index(k),): v for k, v in values.items()}, aligned)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.ptx")
            path.write_text(code.asm["ptx"])
            said = subprocess.run([tool("ptxas"), "-v", "--gpu-name", "sm_90a", str(path), "-o", str(path) + ".o"],
                                  capture_output=True, text=True, check=True).stderr
        print(config.rows, dtype, code.metadata.shared, "serialized" in said, code.asm["ptx"].count("wgmma.mma_async"))
""")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for rows, _dtype, shared, serialized, wgmmas in lines:
        assert int(shared) <= 227 * 1024, rows
        assert serialized == "False", rows
        assert int(wgmmas) == 2 * 4 * (2 if rows == "256" else 1), rows
