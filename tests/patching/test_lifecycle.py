"""A quantized model's life under the patch: copies, files, devices, merges, toggles, processes, reloads.

Each test compares with the same life without the patch, to the bit, and asserts that the kernel was hit.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import expected, quantized
from subprocess_python import program
from target import TARGET, linear

import nf4_patch
from nf4_patch.nf4.weight import Weight
from nf4_patch.patching.counters import counters


def weight_of(layer):
    return F.dequantize_4bit(layer.weight, layer.weight.quant_state)


def from_state_dict(layer, device):
    state = layer.state_dict()
    stats = {k.removeprefix("weight."): v for k, v in state.items() if k != "weight"}
    again = bnb.nn.Linear4bit(128, 96, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    again.weight = bnb.nn.Params4bit.from_prequantized(state["weight"].data, stats, device=device)
    return again


def there_and_back(layer, device):
    if device.type == "cuda":
        return layer.to("cpu").to(device)
    # No second device here: the bytes are moved by hand, as accelerate's hooks do.
    layer.weight.data = layer.weight.data.clone()
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.clone()
    return layer


LIVES = {
    "copied": lambda layer, device: copy.deepcopy(layer),
    "pickled": lambda layer, device: pickle.loads(pickle.dumps(layer)),
    "state_dict": from_state_dict,
    "there and back": there_and_back,
}


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_the_weight_survives(life, nested, device, patched):
    layer = linear(device, 128, 96, compress_statistics=nested)
    before = weight_of(layer)
    state = layer.weight.quant_state
    assert torch.equal(before, expected(layer.weight.data, state))
    again = life(layer, device)
    hits = counters.hits(TARGET)
    after = weight_of(again)
    assert torch.equal(before, after)
    assert counters.hits(TARGET) == hits + 1


def test_a_state_that_is_changed_between_calls(device, patched):
    """Every field that the original reads, changed on one live state."""
    packed, state = quantized((128, 64), torch.float16, device, seed=1)
    F.dequantize_4bit(packed, state)

    for field, value in (
        ("quant_type", "fp4"),
        ("quant_type", "nf4"),
        ("code", torch.linspace(-1, 1, 16, device=device)),  # never read: quant_type names the table
        ("code", torch.zeros(3, device=device)),
        ("dtype", torch.bfloat16),
        ("shape", torch.Size((64, 128))),
        ("absmax", state.absmax.flip(0).contiguous()),
        ("state2.code", state.state2.code * 0.5),
        ("offset", state.offset.to(torch.bfloat16)),
    ):
        holder, _, name = field.rpartition(".")
        setattr(state.state2 if holder else state, name, value)
        assert torch.equal(F.dequantize_4bit(packed, state), expected(packed, state)), field
    state.blocksize, state.absmax = 128, state.absmax[::2].contiguous()
    assert torch.equal(F.dequantize_4bit(packed, state), expected(packed, state))
    packed.bitwise_xor_(255)  # the same tensor, other bytes
    assert torch.equal(F.dequantize_4bit(packed, state), expected(packed, state))


def test_nothing_is_kept_alive(device, patched):
    packed, state = quantized((128, 64), torch.float16, device)
    result = F.dequantize_4bit(packed, state)
    alive = [weakref.ref(t) for t in (packed, state, state.absmax, state.state2.absmax, result)]
    del packed, state, result
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_from_pretrained_save_pretrained_dequantize(checkpoint, tmp_path, device):
    """transformers: quantize on load, save 4-bit, load the 4-bit files, model.dequantize(): same bits, all hits."""
    program("transformers_round_trip", checkpoint, tmp_path, device, interpreted=True)


def test_imported_again():
    """The target, and all of nf4_patch while it is on: the second says to restart the process, the first goes on."""
    program("imported_again", interpreted=True)


def test_lora_on_packed_experts_trains_the_same_whatever_else_is_asked_for_later():
    """With experts="4bit" named once: every number of a step afterwards is that of the first one."""
    import tiny_experts

    nf4_patch.enable(experts="4bit")
    model = tiny_experts.with_lora(tiny_experts.model_of("qwen3", lora=False))
    first = tiny_experts.step(model)
    assert sum("experts" in name for name in first) == 4 * tiny_experts.LAYERS
    for later in ({}, {"cache": "1GiB"}, {"matmul": "off"}, {}):
        nf4_patch.enable(**later)
        assert tiny_experts.same(tiny_experts.step(model), first), later
    with nf4_patch.enabled(cache="off"):
        assert tiny_experts.same(tiny_experts.step(model), first)
    assert tiny_experts.same(tiny_experts.step(model), first)


def test_a_storage_of_fewer_bytes_in_the_same_place_is_another_weight():
    """Same address and same shape as a bf16 storage seen before, half the bytes: its remembered launch would read past them."""
    memory = torch.zeros(64, dtype=torch.uint8)
    halves, all_of_it = memory[:32].view(32, 1), memory.view(torch.bfloat16).view(32, 1)
    absmax = torch.ones(2)
    keys = {
        Weight(packed, absmax, None, None, None, 64, 0, (128,), torch.bfloat16, "nf4").known()
        for packed in (halves, all_of_it, memory[:32].view(32, 1))
    }
    assert len(keys) == 2
