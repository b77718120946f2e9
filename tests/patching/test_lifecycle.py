"""A quantized model with the patch: copies, files, devices, merges, toggles, processes, reloads.

Each test compares bit for bit with the same actions without the patch, and checks that the kernel was hit.
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


def test_nothing_is_kept_alive(device, patched):
    packed, state = quantized((128, 64), torch.float16, device)
    result = F.dequantize_4bit(packed, state)
    alive = [weakref.ref(t) for t in (packed, state, state.absmax, state.state2.absmax, result)]
    del packed, state, result
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_from_pretrained_save_pretrained_dequantize(checkpoint, tmp_path, device):
    """With transformers, quantize on load, save and load 4-bit files, and call model.dequantize().

    All calls hit, with the same bits.
    """
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    options = {"device_map": {"": device}, "dtype": torch.float32}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = LlamaForCausalLM.from_pretrained(checkpoint, quantization_config=quantization, **options)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, **options)
    want = model.dequantize(dtype=torch.float32).state_dict()
    nf4_patch.enable()
    found = again.dequantize(dtype=torch.float32).state_dict()
    hits = nf4_patch.status().hits  # 7 weights; some releases of transformers dequantize each twice
    assert hits and hits % 7 == 0 and nf4_patch.status().fallbacks == 0
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.full
def test_imported_again():
    """Import the target again, and all of nf4_patch while it is on.

    The second import says to restart the process, the first goes on.
    """
    program("imported_again", interpreted=True)
