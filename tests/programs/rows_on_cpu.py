"""Dequantize and merge weights on a CPU whose row length is no multiple of the blocksize. The results are right.

Nothing is interpreted, because the original runs on a CPU.
"""

import contextlib
import itertools
import logging

import bitsandbytes as bnb
import bitsandbytes.functional as F
import peft
import torch
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

import nf4_patch
from nf4_patch.moe.read import PackedExperts
from nf4_patch.nf4.dequantize import reference
from nf4_patch.libraries.bitsandbytes import cpu, stacks
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.quant_state import weight_of

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("nf4_patch").addHandler(handler)
faulty = cpu.misreads_rows()
stock = F.dequantize_4bit
weight = torch.randn(1152, 4304, generator=torch.Generator().manual_seed(0))


def apart(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


assert (apart(stock(*F.quantize_4bit(weight, quant_type="nf4")), weight) > 0.2) is faulty
nf4_patch.enable()
SHAPES = [(1152, 4304), (2, 80), (3, 4, 48), (64, 96), (7, 65), (1, 80), (80,), (64, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = [contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.device("cpu")]
for shape, dtype, nested, kind in itertools.product(SHAPES, DTYPES, (False, True), ("nf4", "fp4")):
    torch.manual_seed(0)
    packed, state = F.quantize_4bit(torch.randn(shape).to(dtype), quant_type=kind, compress_statistics=nested)
    want = reference.dense(weight_of(packed, state))
    for mode in MODES if shape == (2, 80) else MODES[:1]:
        with mode():
            got = F.dequantize_4bit(packed, state)
        assert got.dtype is dtype and torch.equal(got.view(shape), want), (shape, dtype)
    if len(shape) == 2:
        assert torch.equal(F.dequantize_4bit(packed.t(), state), want.t())

layer = bnb.nn.Linear4bit(4304, 1152, bias=False, quant_type="nf4", compute_dtype=torch.float32)
layer.weight = bnb.nn.Params4bit(weight, quant_type="nf4", requires_grad=False)
layer = layer.to("cpu").train()
state = layer.weight.quant_state
want = reference.dense(weight_of(layer.weight.data, state))
assert torch.equal(dequantize_bnb_weight(layer.weight), want)  # model.dequantize()

# A step of bitsandbytes' own layer is as without the patch, so that its gradient fits its forward.
x = torch.randn(600, 4304, requires_grad=True)
steps = []
for switch_it in (nf4_patch.enable, nf4_patch.disable):
    switch_it()
    x.grad = None
    layer(x).square().sum().backward()
    steps.append(x.grad)
assert torch.equal(*steps)
nf4_patch.enable()

# A merge of peft: its sum is quantized again from the right weight.
base = torch.nn.Sequential(layer)
base.is_loaded_in_4bit = True
model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
adapted = model.base_model.model[0]
delta = adapted.get_delta_weight("default")
adapted.merge()
merged = adapted.base_layer.weight
assert apart(reference.dense(weight_of(merged.data, merged.quant_state)), want + delta) < 0.12

# Packed experts, which are merged and saved while the patch is off too.
stack = torch.randn(3, 128, 96)
packed, state = F.quantize_4bit(stack, quant_type="nf4")
for switch_it in (nf4_patch.disable, nf4_patch.enable):
    switch_it()
    dense = PackedExperts(packed, state, Dequantizer("test"), decode=stacks.decoded).dense()
    assert torch.equal(dense, reference.dense(weight_of(packed, state)))

hits = [each for each in nf4_patch.status().shapes if each.kernel == "on the CPU" and each.shape == (1152, 4304)]
said = [line for line in lines if "no multiple of the blocksize" in line]
assert bool(hits) is faulty and len(said) == faulty, (hits, lines)
print("faulty" if faulty else "right")
