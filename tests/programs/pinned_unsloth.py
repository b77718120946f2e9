"""Weights pinned for Unsloth's compiled layers: equal to the bit through every change, in two graphs at most.

``pinned_unsloth.py CHECKPOINTING``: "none", "reentrant" or "non-reentrant".
"""

import copy
import gc
import io
import sys
from typing import Any

import torch
import nf4_patch
import unsloth
import bitsandbytes as bnb
from unsloth.kernels import fast_lora
from unsloth.models import _block_compile
from nf4_patch.patching.cache.store import cache
from nf4_patch.patching.reasons import Uncached
from nf4_patch.patching.switch import switch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WEIGHTS, LAYERS, SIDE = 3, 2, 64
CHECKPOINTING = sys.argv[1]
BUFFER = bytearray(SIDE * SIDE // 2)
if not GPU:  # Unsloth decodes in the graph with a kernel that has no CPU; the op of this package has
    unsloth.kernels.utils._USE_NF4_KERNELS = False


def linear(seed):
    torch.manual_seed(seed)
    return (
        bnb.nn.Linear4bit(SIDE, SIDE, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).bfloat16().to(DEVICE)
    )


class Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.projections = torch.nn.ModuleList(linear(3 * seed + i) for i in range(WEIGHTS))
        self.a = torch.nn.ParameterList(torch.randn(4, SIDE, device=DEVICE).bfloat16() for _ in range(WEIGHTS))
        self.b = torch.nn.ParameterList(torch.randn(SIDE, 4, device=DEVICE).bfloat16() for _ in range(WEIGHTS))

    def forward(self, hidden_states):
        parts = [
            item
            for p, a, b in zip(self.projections, self.a, self.b, strict=True)
            for item in (p.weight, p.weight.quant_state, a, b, 0.5)
        ]
        q, k, v = fast_lora._apply(fast_lora.LoRA_QKV, hidden_states, *parts, False)
        return hidden_states + fast_lora._apply(fast_lora.LoRA_W, q + k * v, *parts[:5])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i) for i in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            if CHECKPOINTING == "none":
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=CHECKPOINTING == "reentrant")
        return x


def step():
    x = values.clone().requires_grad_()
    model.zero_grad()
    model(x).float().square().mean().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def agree(a, b):
    return len(a) == len(b) > 2 * WEIGHTS * LAYERS and all(map(torch.equal, a, b))


def without():
    """The same graphs as without the cache."""
    gate.on = False
    try:
        return step()
    finally:
        gate.on = True


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def weight(layer=0):
    return model.layers[layer].projections[0].weight


def bytes_of(seed):
    return linear(seed).weight.data.clone()


def write_in_place():
    with torch.no_grad():
        weight().copy_(bytes_of(50))


def replace_data():
    weight().data = bytes_of(51)


def replace_data_at_once():
    for seed in (52, 53, 54):  # the memory of the first may serve the third
        weight().data = bytes_of(seed)


def replace_data_by_a_buffer(seed=58):
    if GPU:
        weight().data = bytes_of(seed)
    else:
        BUFFER[:] = bytes_of(seed).numpy().tobytes()
        weight().data = torch.frombuffer(BUFFER, dtype=torch.uint8).view(-1, 1)


def replace_data_at_the_same_address():
    replace_data_by_a_buffer(59)


def replace_parameter():  # as peft does at a merge
    model.layers[0].projections[0].weight = linear(55).weight


def replace_module():
    model.layers[0].projections[0] = linear(56)


def replace_state():
    weight().quant_state = copy.copy(linear(57).weight.quant_state)


def copy_state():  # the copy first has what is held of the other
    copied = copy.copy(weight().quant_state)
    copied.absmax = copied.absmax.flip(0)
    weight().quant_state = copied


def write_scales():
    weight().quant_state.absmax.copy_(weight().quant_state.absmax.flip(0))


def write_second_scales():
    weight().quant_state.state2.absmax.mul_(2)


def write_second_code():
    weight().quant_state.state2.code.mul_(0.5)


def write_offset():
    weight().quant_state.offset.mul_(2)


def replace_scales():
    weight().quant_state.absmax = weight().quant_state.absmax.flip(0)


def replace_data_of_scales():
    weight().quant_state.absmax.data = weight().quant_state.absmax.data.flip(0)


def replace_offset():
    weight().quant_state.offset = weight().quant_state.offset * 2


def load():
    source = {
        name: value.flip(0) if value.dtype is torch.uint8 else value for name, value in model.state_dict().items()
    }
    model.load_state_dict(source, strict=False)


def copy_layer():
    model.layers[0] = copy.deepcopy(model.layers[0])
    gc.collect()  # bitsandbytes' parameters refer to their module


def exchange_layers():
    first, second = model.layers
    model.layers[0], model.layers[1] = second, first


def exchange_weights():
    first, second = weight(0), weight(1)
    model.layers[0].projections[0].weight, model.layers[1].projections[0].weight = second, first


def exchange_modules():  # and write into the one that was held for the other layer
    first, second = (layer.projections for layer in model.layers)
    first[0], second[0] = second[0], first[0]
    write_in_place()


def swap_tensors():
    torch.utils.swap_tensors(weight(0), weight(1))


def move():
    model.layers[0].to("cpu").to(DEVICE)


def evaluate():
    with torch.no_grad():
        model.eval()(values)
    model.train()


def release():
    nf4_patch.release()
    assert not cache.weights


def write_into_pinned():
    cached = next(each for each in cache.weights.values() if each.owner() is weight())
    cached.dense.zero_()


CHANGES = [
    write_in_place, replace_data, replace_data_at_once, replace_data_by_a_buffer, replace_data_at_the_same_address, replace_parameter, replace_module, replace_state, copy_state,
    write_scales, write_second_scales, write_second_code, write_offset, replace_scales, replace_data_of_scales,
    replace_offset, load,
    copy_layer, exchange_layers, exchange_weights, exchange_modules, swap_tensors, move, evaluate, release, write_into_pinned,
]  # fmt: skip
_block_compile._wrap(
    Layer, {**_block_compile._COMPILE_OPTIONS}, 1
)  # before the patch is on, as where a model is loaded first
stock = Layer.forward
model: Any = Model()
values = torch.randn(2, 8, SIDE, dtype=torch.bfloat16, device=DEVICE)
gate = switch.gates["cache"]
if CHECKPOINTING == "non-reentrant":  # whose recompute must save what its forward saved: nothing is pinned
    nf4_patch.enable(cache=2**30)
    for change in (*CHANGES[:8], release):
        change()
        assert agree(step(), without()), change.__name__
    assert cache.uncached[Uncached.CHECKPOINT] and not nf4_patch.status().cache.compiled
    print("pinned")
    sys.exit()
nf4_patch.enable(cache=2**30)
want = without()
for _ in range(2):
    assert agree(step(), want)
    assert nf4_patch.status().cache.compiled == WEIGHTS * LAYERS
for change in CHANGES:
    before = graphs()
    change()
    want = without()
    new = graphs() - before
    for _ in range(2):
        assert agree(step(), want), change.__name__
        assert nf4_patch.status().cache.compiled == WEIGHTS * LAYERS, (change.__name__, nf4_patch.status().cache)
    assert graphs() - before == 2 * new, (change.__name__, new)  # as many as without the cache
known = graphs()
# half of the budget: one layer; then nothing, then all again
size = sum(cache.taken.values()) // 2
for budget, layers in ((f"{size}B", 1), (f"{size - 1}B", 0), (2**30, LAYERS)):
    nf4_patch.enable(cache=budget)
    for _ in range(2):
        assert agree(step(), without()), budget
    assert nf4_patch.status().cache.compiled == WEIGHTS * layers, (budget, nf4_patch.status().cache)
    assert sum(cache.taken.values()) <= cache.budget
    assert graphs() == known, budget
want = step()
assert Layer.forward is not stock
nf4_patch.disable()
assert not cache.weights and Layer.forward is stock
assert not GPU or agree(step(), want)

# what is saved names nothing of this package
nf4_patch.enable(cache=2**30)
step()
assert nf4_patch.status().cache.compiled
file = io.BytesIO()
torch.save([model.layers[0].projections, weight(), weight().quant_state], file)
assert b"nf4_patch" not in file.getvalue()
model = None
gc.collect()
assert not cache.weights and not any(cache.pinned.values())
print("pinned")
