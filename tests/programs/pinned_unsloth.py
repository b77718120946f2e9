"""Weights pinned for Unsloth's compiled layers: equal to the bit through every change, in two graphs at most.

``pinned_unsloth.py CHECKPOINTING``: "none", "reentrant" or "non-reentrant".
"""

import copy
import functools
import gc
import io
import sys
from typing import Any

import torch
import nf4_patch
import unsloth
import changes
import target
from unsloth.kernels import fast_lora, utils
from unsloth.models import _block_compile
from nf4_patch.nf4.dequantize import launch, reference
from nf4_patch.cache.store import cache
from nf4_patch.cache.option import Uncached
from nf4_patch.patching.switch import switch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WEIGHTS, LAYERS, SIDE = 3, 2, 64
CHECKPOINTING = sys.argv[1]


def formula(weight, out=None):
    dense = reference.dequantize(weight._replace(packed=weight.bytes()))
    return dense if out is None else out.copy_(dense)


if not GPU:  # Unsloth decodes in the graph with a kernel that has no CPU; the op of this package has
    unsloth.kernels.utils._USE_NF4_KERNELS = False
    launch.dequantize = formula  # the kernel's bits, in a tenth of the interpreter's time


def linear(seed):
    return target.linear(torch.device(DEVICE), SIDE, SIDE, seed=seed, weights=torch.bfloat16)


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


def load():
    source = {name: v.flip(0) if v.dtype is torch.uint8 else v for name, v in model.state_dict().items()}
    model.load_state_dict(source, strict=False)


def copy_layer():
    model.layers[0] = copy.deepcopy(model.layers[0])
    gc.collect()  # because bitsandbytes' parameters refer to their module


def exchange_weights():
    first, second = (layer.projections[0] for layer in model.layers)
    first.weight, second.weight = second.weight, first.weight


def exchange_modules():  # and write into the one that was held for the other layer
    first, second = (layer.projections for layer in model.layers)
    first[0], second[0] = second[0], first[0]
    change_weight(OF_A_WEIGHT["bytes copied"])


def change_weight(change):
    change(changes.Place(model.layers[0].projections[0]))


def evaluate():
    with torch.no_grad():
        model.eval()(values)
    model.train()


OF_A_WEIGHT = dict(changes.NUMBERS)
del OF_A_WEIGHT["bytes refilled"]  # which no version counter sees: such a weight is not pinned
CHANGES = {
    **{name: functools.partial(change_weight, change) for name, change in OF_A_WEIGHT.items()},
    "replace the module": lambda: model.layers[0].projections.__setitem__(0, linear(56)),
    "load": load,
    "copy the layer": copy_layer,
    "exchange layers": lambda: setattr(model, "layers", torch.nn.ModuleList(reversed(model.layers))),
    "exchange weights": exchange_weights,
    "exchange modules": exchange_modules,
    "swap tensors": lambda: torch.utils.swap_tensors(weight(0), weight(1)),
    "move": lambda: model.layers[0].to("cpu").to(DEVICE),
    "evaluate": evaluate,
    "release": nf4_patch.release,
    "write into what is pinned": lambda: (
        next(kept for kept in cache.weights.values() if kept.tensors and kept.tensors[0]() is weight()).views[0].zero_()
    ),
}


class Late(Layer):
    forward = Layer.forward


# before the patch is on, as where a model is loaded first
_block_compile._wrap(Layer, {**_block_compile._COMPILE_OPTIONS}, 1)
stock = Layer.forward
model: Any = Model()
values = torch.randn(2, 8, SIDE, dtype=torch.bfloat16, device=DEVICE)
gate = switch.gates["cache"]
if CHECKPOINTING == "non-reentrant":  # whose recompute must save what its forward saved: nothing is pinned
    nf4_patch.enable(cache=2**30)
    for name in (*OF_A_WEIGHT, "release"):
        CHANGES[name]()
        assert agree(step(), without()), name
    assert cache.uncached[Uncached.CHECKPOINT] and not nf4_patch.status().cache.compiled
    print("pinned")
    sys.exit()
nf4_patch.enable(cache=2**30)
want = without()
for _ in range(2):
    assert agree(step(), want)
    assert nf4_patch.status().cache.compiled == WEIGHTS * LAYERS
for name, change in CHANGES.items():
    before = graphs()
    change()
    want = without()
    new = graphs() - before
    for _ in range(2):
        assert agree(step(), want), name
        assert nf4_patch.status().cache.compiled == WEIGHTS * LAYERS, (name, nf4_patch.status().cache)
    assert graphs() - before == 2 * new, (name, new)  # as many as without the cache
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


# somebody's wrapper that writes into what it gets: memory of its own at every step
def doubled(function):
    def foreign(W, *args, **kwargs):
        w = function(W, *args, **kwargs)
        w.data.mul_(2)
        return w

    return foreign


held = utils.fast_dequantize
for module in (utils, fast_lora):
    module.fast_dequantize = doubled(held)
for option in ("off", 2**30):
    nf4_patch.enable(cache=option)
    steps = [step() for _ in range(3)]
    want = steps[0] if option == "off" else want
    assert all(agree(each, want) for each in steps)
assert cache.uncached[Uncached.WRAPPED] and not nf4_patch.status().cache.compiled
for module in (utils, fast_lora):
    module.fast_dequantize = held
nf4_patch.disable()

# what is saved names nothing of this package
nf4_patch.enable(cache=2**30)
step()
assert nf4_patch.status().cache.compiled
_block_compile._wrap(Late, {**_block_compile._COMPILE_OPTIONS}, 1)  # and where one is loaded later
late = Late(9)
late(values.clone().requires_grad_()).sum().backward()
assert nf4_patch.status().cache.compiled == WEIGHTS * (LAYERS + 1)
file = io.BytesIO()
torch.save([model.layers[0].projections, weight(), weight().quant_state], file)
assert b"nf4_patch" not in file.getvalue()
model = late = None
gc.collect()
assert not cache.snapshot().weights
print("pinned")
