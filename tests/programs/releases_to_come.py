"""``releases_to_come.py CHANGE [compiled]``: what open pull requests do to the patched libraries, done to the source of the installed ones.

bitsandbytes 2051: nested weights are decoded by an operator of their own. 2049: a weight of too many elements (here: 4096) is
decoded in chunks. 2035: ``save_for_backward`` keeps the weight.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader

DEQUANTIZE = """
TAKEN, unchanged = [], dequantize_4bit
def dequantize_4bit(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    if quant_state is not None and changes(A, quant_state):
        TAKEN.append(quant_state)
        return changed(A, quant_state)
    return unchanged(A, quant_state, absmax, out, blocksize, quant_type)
"""
NESTED = """
def changes(A, state):
    return state.nested and _dequantize_4bit_nested_supported(A.device.index)
def _dequantize_4bit_nested_supported(index):
    return True
def changed(A, state):
    return unchanged(A, state)
"""
CHUNKS = """
def changes(A, state):
    return state.shape.numel() > 4096
def changed(A, state):
    def chunk(at):
        absmax = state.absmax[at // state.blocksize : (at + 4096) // state.blocksize]
        part = QuantState(absmax, torch.Size([4096]), state.code, state.blocksize, state.quant_type, state.dtype)
        return dequantize_4bit(A[at // 2 : at // 2 + 2048], part)
    return torch.cat([chunk(at) for at in range(0, state.shape.numel(), 4096)]).view(state.shape)
"""
SAVED = (
    ("ctx.tensors = (None, B)", "ctx.save_for_backward(B)"),
    ("ctx.tensors = (None, None)", "ctx.save_for_backward()"),
    ("_, B = ctx.tensors", "(B,) = ctx.saved_tensors"),
)
CHANGE = sys.argv[1]
MODULE, REPLACED, APPENDED = {
    "2051": ("bitsandbytes.functional", (), DEQUANTIZE + NESTED),
    "2049": ("bitsandbytes.functional", (), DEQUANTIZE + CHUNKS),
    "2035": ("bitsandbytes.autograd._functions", SAVED, ""),
}[CHANGE]


class Changed(SourceFileLoader):
    def path_stats(self, path):
        raise OSError("no compiled file is of this source")

    def get_data(self, path):
        source = super().get_data(path).decode()
        for old, new in REPLACED:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        return (source + APPENDED).encode()


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            spec = PathFinder.find_spec(name, path)
            spec.loader = Changed(name, spec.origin)
            return spec


sys.meta_path.insert(0, Finder())
import torch

import nf4_patch

nf4_patch.enable(cache="1GiB")


def row(name):
    return next(t for t in nf4_patch.status().targets if t.name.endswith(name))


from target import linear
import bitsandbytes.functional as F

layer = linear(torch.device("cuda" if torch.cuda.is_available() else "cpu"), compress_statistics=CHANGE != "2049")
start = torch.randn(600, 256, device=layer.weight.device, dtype=torch.bfloat16)


def step(forward=layer):
    x = start.clone().requires_grad_()
    y = forward(x)
    assert CHANGE != "2035" or forward is not layer or y.grad_fn.saved_tensors
    y.float().square().sum().backward()
    return y.detach(), x.grad


step()  # quantizes
nf4_patch.disable()
want, decoded = step(), F.dequantize_4bit(layer.weight, layer.weight.quant_state)
taken = getattr(F, "TAKEN", [1])
assert taken
taken.clear()
for options in ({}, {"cache": "1GiB"}):
    nf4_patch.enable(**options)
    before = row("functional.dequantize_4bit").hits, nf4_patch.status().cache.hits
    for _ in range(2):
        assert all(map(torch.equal, step(), want))
        assert torch.equal(F.dequantize_4bit(layer.weight, layer.weight.quant_state), decoded)
    after = row("functional.dequantize_4bit"), nf4_patch.status().cache.hits
    assert after[0].state == "patched" and after[0].hits > before[0] and not after[0].fallbacks, after
    assert bool(options) == (after[1] > before[1]), (before, after)
    if sys.argv[2:]:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            assert all(map(torch.equal, step(compiled), want))
assert not taken

if CHANGE == "2049":  # ours refuses the whole weight: the original decodes it, in chunks, by the same name

    def product(x):
        return (x @ F.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(x.dtype).t()).sum()

    got = torch.func.grad(product)(start)
    assert taken
    nf4_patch.disable()
    assert torch.equal(got, torch.func.grad(product)(start))
