"""The patch in unsloth_zoo's decode of expert stacks: bits, fallbacks, compiled calls."""

import contextlib
import copy
import inspect
import os
import unsloth
import torch
import bitsandbytes as bnb
import bitsandbytes.functional as F
import nf4_patch
from nf4_patch.patching.switch import switch

nf4_patch.enable()
from unsloth_zoo.temporary_patches import moe_triton_kernels as zoo, moe_utils

GPU = torch.cuda.is_available()
torch.set_default_device("cuda" if GPU else "cpu")
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    zoo._K = zoo._kernels()
    del os.environ["TRITON_INTERPRET"]
    zoo._launch_device = lambda device: contextlib.nullcontext()
switch.defer, available = "never", zoo.moe_triton_kernels_available
SHAPE = (3, 64, 256)  # an expert is a block of the second level


def row():
    return next(t for t in nf4_patch.status().targets if t.name.endswith("moe_triton_kernels.nf4_dequant_triton"))


def stack(dtype=torch.bfloat16, nested=True, quant_type="nf4", shape=SHAPE):
    torch.manual_seed(0)
    return F.quantize_4bit(torch.randn(shape, dtype=dtype), quant_type=quant_type, compress_statistics=nested)


def stock(function, *args):
    switch.on, zoo.moe_triton_kernels_available = False, lambda device: True
    result = function(*args)
    assert not zoo._DISABLED_REASON, zoo._DISABLED_REASON
    switch.on, zoo.moe_triton_kernels_available = True, available
    return result


# the bits of Unsloth's kernel and of bitsandbytes, whatever shape is asked for
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    for nested in (True, False):
        packed, state = stack(dtype, nested)
        got, hits = zoo.nf4_dequant_triton(packed, state, SHAPE), row().hits
        assert torch.equal(got, stock(F.dequantize_4bit, packed, state))
        if GPU or dtype is not torch.bfloat16:  # to which the interpreter truncates
            assert torch.equal(got, stock(zoo.nf4_dequant_triton, packed, state, SHAPE))
        assert row().hits == hits
        assert torch.equal(zoo.nf4_dequant_triton(packed, state, (192, 256)), got.view(192, 256))
assert row().hits == 12, row()
packed, state = stack()
want = stock(F.dequantize_4bit, packed, state)

# Unsloth's own callers: all experts, then some by their ids, then one, whose packed bytes are [1, bytes]
weight = bnb.nn.Params4bit(packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True)
weight._original_shape = torch.Size(SHAPE)
assert torch.equal(moe_utils._get_base_weight(weight), want)
if hasattr(moe_utils, "_dequantize_bnb4bit_experts"):
    for ids in ([2, 0], [1]):
        assert torch.equal(moe_utils._dequantize_bnb4bit_experts(weight, torch.tensor(ids)), want[ids])
if "out" in inspect.signature(zoo.nf4_dequant_triton).parameters:
    out = torch.empty(SHAPE, dtype=torch.bfloat16)
    assert torch.equal(zoo.nf4_dequant_triton(packed, state, SHAPE, out=out), want) and torch.equal(out, want)
assert not row().fallbacks, row()

# what the original leaves to bitsandbytes and the kernel decodes; what neither does
four = stack(quant_type="fp4")
assert stock(zoo.nf4_dequant_triton, *four) is None
assert torch.equal(zoo.nf4_dequant_triton(*four), stock(F.dequantize_4bit, *four))
assert zoo.nf4_dequant_triton(packed, state, (3, 64, 128)) is None
assert zoo.nf4_dequant_triton(packed, None, SHAPE) is None
unshaped = copy.copy(state)
unshaped.shape = None
assert GPU or zoo.nf4_dequant_triton(packed, unshaped, SHAPE) is None
assert row().fallbacks == {"SIZE_MISMATCH": 1 if GPU else 2, "NOT_4BIT": 1}, row()
if "out" in inspect.signature(zoo.nf4_dequant_triton).parameters:
    counted, unwritten = dict(row().fallbacks), (torch.zeros(SHAPE), torch.zeros(SHAPE, dtype=torch.bfloat16))
    assert zoo.nf4_dequant_triton(packed, state, SHAPE, out=unwritten[0]) is None  # of another dtype
    assert zoo.nf4_dequant_triton(packed, state, (3, 64, 128), out=unwritten[1]) is None
    assert not any(out.any() for out in unwritten)
    counted["SIZE_MISMATCH"] += 1
    assert row().fallbacks == counted | {"OUT_MISMATCH": 1}, row()

# a compiled call stays Unsloth's, which answers None on a CPU; ours is one op of the same graph if it is asked for
from torch._dynamo.testing import CompileCounter

for defer, decoded in (("auto", GPU), ("never", True)):
    switch.defer, graphs, hits = defer, CompileCounter(), row().hits

    @torch.compile(fullgraph=True, backend=graphs)
    def compiled(x, packed):
        weight = zoo.nf4_dequant_triton(packed, state, SHAPE)
        return x + (0 if weight is None else weight)

    for _ in range(2):
        x = torch.ones(SHAPE, dtype=torch.bfloat16)
        assert torch.equal(compiled(x, packed), x + want if decoded else x)
    assert graphs.frame_count == 1 and row().hits == hits
switch.defer, hits = "always", row().hits
assert (zoo.nf4_dequant_triton(packed, state, SHAPE) is not None) is GPU
assert row().fallbacks["DEFERRED"] == 1 and row().hits == hits

print("state", row().state)
nf4_patch.disable()
assert "nf4_patch" not in zoo.nf4_dequant_triton.__code__.co_filename
