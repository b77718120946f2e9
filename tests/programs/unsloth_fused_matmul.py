"""Run Unsloth's functions that the fused matmul replaces, on the GPU: ``unsloth_fused_matmul.py gemv|matmul_lora``."""

import sys

import nf4_patch

nf4_patch.enable(matmul="auto")
import torch
import target
import unsloth
from fused_matmul import error, exact, multiply
from oracle import layout_of, quantized
from unsloth.kernels import fast_lora, utils

from nf4_patch.nf4.dequantize import reference


def row(attribute):
    return target.row(f"unsloth.kernels.utils.{attribute}")


def gemv():
    name = "_fast_gemv_bnb" if hasattr(utils, "_fast_gemv_bnb") else "fast_gemv"
    packed, state = quantized((1000, 2048), torch.bfloat16, "cuda")
    layout = layout_of(packed, state)
    x = torch.randn(1, 1, 2048, dtype=torch.bfloat16, device="cuda")
    got = utils.fast_gemv(x, packed, state)
    assert row(name).hits == 1, nf4_patch.status()
    assert torch.equal(got, multiply(x, layout))
    out = torch.full((1, 1, 1000), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert utils.fast_gemv(x, packed, state, out=out) is out
    assert torch.equal(out, got)
    nf4_patch.disable()
    stock = utils.fast_gemv(x, packed, state)
    assert stock.shape == got.shape
    # Unsloth's kernel never rounds a weight to 16 bits and is nearer to the truth than dequantize + matmul: that is ours'
    truth = x.double() @ exact(layout).t()
    linear = torch.nn.functional.linear(x, reference.dequantize(layout))
    assert error(got, truth) <= 1.01 * error(linear, truth)
    nf4_patch.enable(matmul="off")
    assert torch.equal(utils.fast_gemv(x, packed, state), stock)
    assert row(name).hits == 2, nf4_patch.status()
    if hasattr(utils, "_gemv_rows"):
        nf4_patch.enable(matmul="auto")
        few = torch.randn(4, 1, 2048, dtype=torch.bfloat16, device="cuda")
        got = utils._gemv_rows(few, packed, state, None)
        assert row("_gemv_rows").hits == 1, nf4_patch.status()
        assert torch.equal(got, multiply(few, layout))
        wide = torch.full((4, 1, 1008), float("nan"), dtype=torch.bfloat16, device="cuda")
        utils._gemv_rows(few, packed, state, wide[..., :1000])  # rows apart: for the original
        served = row("_gemv_rows")
        assert served.hits == 1 and served.fallbacks == {"OUT_MISMATCH": 1}, served


@torch.no_grad()
def matmul_lora():
    """Compare with dequantize + matmul, with and without an adapter. The backward runs the original."""
    assert fast_lora.matmul_lora is utils.matmul_lora
    packed, state = quantized((1024, 2048), torch.bfloat16, "cuda")
    truth = exact(layout_of(packed, state))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    def original(*arguments):
        nf4_patch.disable()
        result = utils.matmul_lora(*arguments)
        nf4_patch.enable(matmul="auto")
        return result

    hits = 0
    for shape in ((1, 5, 2048), (4, 8, 2048), (7, 2048)):
        for adapter in ((None, None, None), (random(8, 2048).float(), random(1024, 8).float(), 0.5)):
            x = random(*shape)
            got = utils.matmul_lora(x, packed, state, *adapter)
            hits += 1
            assert row("matmul_lora").hits == hits, nf4_patch.status()
            stock = original(x, packed, state, *adapter)
            assert got.shape == stock.shape and got.dtype is stock.dtype
            want = x.double() @ truth.t()
            if adapter[0] is not None:
                want = want + (x.double() @ adapter[0].double().t()) @ adapter[1].double().t() * 0.5
            assert error(got, want) <= 1.02 * error(stock, want), (shape, error(got, want), error(stock, want))
    for x, weight in ((random(100, 2048), packed), (random(7, 1024), packed.t())):  # past 64 rows; backward
        got = utils.matmul_lora(x, weight, state, None, None, None)
        assert torch.equal(got, original(x, weight, state, None, None, None))
    served = row("matmul_lora")
    assert served.hits == hits and {"NOT_FASTER", "MATMUL_OPERANDS"} <= served.fallbacks.keys(), served


{"gemv": gemv, "matmul_lora": matmul_lora}[sys.argv[1]]()
