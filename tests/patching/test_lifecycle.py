"""A quantized model's life under the patch: copies, files, devices, merges, toggles, processes, reloads.

Each test compares with the same life without the patch, to the bit, and asserts that the kernel was hit.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import expected, quantized
from subprocess_python import python
from target import TARGET, linear, same

import nf4_patch
from nf4_patch.nf4.layout import identity
from nf4_patch.patching.counters import counters


def weight_of(layer):
    return F.dequantize_4bit(layer.weight, layer.weight.quant_state)


def saved(layer, device):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


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
    "saved": saved,
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


def test_requantizing_in_place(device, patched):
    """The same tensors, other bytes: the result follows."""
    packed, state = quantized((128, 64), torch.float16, device)
    first = F.dequantize_4bit(packed, state)
    weight = torch.randn(128, 64, device=device, dtype=torch.float16)
    again, state2 = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    packed.copy_(again)
    state.absmax.copy_(state2.absmax)
    state.state2.absmax.copy_(state2.state2.absmax)
    state.offset.copy_(state2.offset)
    assert torch.equal(F.dequantize_4bit(packed, state), expected(again, state2))
    assert not torch.equal(F.dequantize_4bit(packed, state), first)
    assert counters.hits(TARGET) >= 3


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


def test_nothing_is_kept_alive(device, patched):
    packed, state = quantized((128, 64), torch.float16, device)
    result = F.dequantize_4bit(packed, state)
    alive = [weakref.ref(t) for t in (packed, state, state.absmax, state.state2.absmax, result)]
    del packed, state, result
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_another_model_at_the_same_addresses(device, patched):
    for seed in range(30):
        quant_type = ("nf4", "fp4")[seed % 2]
        packed, state = quantized((64, 64), torch.float16, device, 64, seed % 3 > 0, quant_type, seed=seed)
        got = F.dequantize_4bit(packed, state)
        assert torch.equal(got, expected(packed, state)), seed
        del packed, state, got
    assert counters.hits(TARGET) >= 30


def test_toggled_in_the_middle_of_training(device):
    def losses(toggle):
        layer = linear(device, 128, 96, seed=3)
        adapter = torch.nn.Linear(128, 96, bias=False).to(device)
        torch.nn.init.constant_(adapter.weight, 0.01)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
        torch.manual_seed(4)
        result = []
        for index in range(8):
            if toggle:
                (nf4_patch.enable if index % 2 else nf4_patch.disable)()
            x = torch.randn(40, 128, device=device, requires_grad=True)
            loss = (layer(x.bfloat16()).float() + adapter(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result += [loss.detach(), x.grad]
        return result

    without = losses(toggle=False)
    assert same(losses(toggle=True), without)
    assert counters.hits(TARGET) >= 4


def test_peft_merge_and_unmerge(device):
    peft = pytest.importorskip("peft")

    def merged():
        torch.manual_seed(5)
        model = torch.nn.Sequential(linear(device, 128, 96, seed=5))
        model.is_loaded_in_4bit = True  # what transformers sets: peft then takes its bitsandbytes layer
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights="gaussian"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        layer = model.base_model.model[0]
        layer.merge()
        inside = expected(layer.weight.data, layer.weight.quant_state)
        layer.unmerge()
        return inside, expected(layer.weight.data, layer.weight.quant_state)

    without = merged()
    with nf4_patch.enabled():
        assert same(merged(), without)
    assert counters.hits(TARGET) >= 2  # merge and unmerge dequantize


def test_from_pretrained_save_pretrained_dequantize(checkpoint, tmp_path, device):
    """transformers: quantize on load, save 4-bit, load the 4-bit files, model.dequantize(): same bits, all hits."""
    python(f"""
    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM
    import nf4_patch
    options = dict(device_map={{"": "{device}"}}, dtype=torch.float32)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = LlamaForCausalLM.from_pretrained({checkpoint!r}, quantization_config=quantization, **options)
    model.save_pretrained({str(tmp_path)!r})
    again = LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, **options)
    def dense(model):
        return {{k: v.clone() for k, v in model.dequantize(dtype=torch.float32).state_dict().items()}}
    without = dense(model)
    nf4_patch.enable()
    with_patch = dense(again)
    hits = nf4_patch.status().hits  # 7 weights; some releases of transformers dequantize each twice
    assert hits and hits % 7 == 0, nf4_patch.status()
    assert nf4_patch.status().fallbacks == 0, nf4_patch.status()
    assert without.keys() == with_patch.keys()
    for name in without:
        assert torch.equal(without[name], with_patch[name]), name
    """, interpreted=True)  # fmt: skip


def test_forked_and_started_workers():
    """DataLoader workers: forked ones inherit the patch, started ones have it by NF4_PATCH=1; both end cleanly."""
    python("""
    import multiprocessing, subprocess, sys
    from importlib.metadata import entry_points
    import bitsandbytes.functional
    def child(queue):
        import bitsandbytes.functional as F, nf4_patch
        queue.put((nf4_patch.is_enabled(), hasattr(F.dequantize_4bit, "__wrapped__")))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=child, args=(queue,))
    worker.start()
    assert queue.get(timeout=120) == (True, True)
    worker.join(60)
    assert worker.exitcode == 0
    if any(e.name == "nf4_patch" for e in entry_points(group="bitsandbytes.backends")):  # the package is installed
        code = "import bitsandbytes.functional as F; print(hasattr(F.dequantize_4bit, '__wrapped__'))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True"]
    """, NF4_PATCH="1")  # fmt: skip


def test_reloaded_modules():
    """importlib.reload of the target, of nf4_patch while it is on, and a target imported anew."""
    python("""
    import importlib, sys
    import bitsandbytes.functional as F, nf4_patch, torch
    from nf4_patch.patching import hooks
    from nf4_patch.patching.adapters import bitsandbytes as adapter
    NAME = "bitsandbytes.functional.dequantize_4bit"
    state = lambda: dict((t.name, t.state) for t in nf4_patch.status().targets)[NAME]
    packed, quant = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
    held = [F.dequantize_4bit]  # a global would follow the patch
    nf4_patch.enable()
    assert state() == "patched"
    importlib.reload(hooks); importlib.reload(adapter)  # while it is on
    nf4_patch.enable()
    assert state() == "patched"
    assert F.dequantize_4bit.__wrapped__ is held[0]  # one replacement, not two
    nf4_patch.disable()
    assert F.dequantize_4bit is held[0]
    nf4_patch.enable()
    replaced = F.dequantize_4bit
    F.dequantize_4bit = held[0]  # what a reload of the target leaves (its ops may be registered only once)
    assert state() == "displaced"
    nf4_patch.enable()
    assert state() == "patched"
    import types
    fresh = types.ModuleType("bitsandbytes.functional"); fresh.__dict__.update(vars(F))
    fresh.dequantize_4bit = held[0]
    sys.modules["bitsandbytes.functional"] = fresh  # imported anew
    assert state() == "displaced", state()
    nf4_patch.enable()
    assert state() == "patched"
    before = nf4_patch.status().hits
    fresh.dequantize_4bit(packed, quant)
    assert nf4_patch.status().hits == before + 1
    nf4_patch.disable()
    assert fresh.dequantize_4bit is held[0]
    """, interpreted=True)  # fmt: skip


def test_a_storage_of_fewer_bytes_in_the_same_place_is_another_weight():
    """Same address and same shape as a bf16 storage seen before, half the bytes: its remembered launch would read past them."""
    memory = torch.zeros(64, dtype=torch.uint8)
    halves, all_of_it = memory[:32].view(32, 1), memory.view(torch.bfloat16).view(32, 1)
    absmax = torch.ones(2)
    keys = {
        identity("nf4", packed, absmax, None, None, None, None, 64, 0, (128,), torch.bfloat16)
        for packed in (halves, all_of_it, memory[:32].view(32, 1))
    }
    assert len(keys) == 2


def test_imported_anew():
    """Deleted from sys.modules and imported again: disable() and enable() of the new one go for what the old one put there."""
    python("""
    import sys
    import bitsandbytes.functional as F, nf4_patch, torch
    held = [F.dequantize_4bit]  # globals would follow the patch
    def again():
        for name in [name for name in sys.modules if name.split(".")[0] == "nf4_patch" and ".nf4" not in name]:
            del sys.modules[name]
        import nf4_patch
        return nf4_patch
    packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
    packed = torch.nn.Parameter(packed, requires_grad=False)
    for _ in range(2):
        nf4_patch.enable(cache="1MiB")
        held[1:] = [F.dequantize_4bit]
        import nf4_patch.patching.cache.reader as reader
        reader.inside.bitsandbytes = "forward"
        F.dequantize_4bit(packed, state)
        assert len(reader.cache.entries) == 1
        nf4_patch = again()
        nf4_patch.disable()
        assert F.dequantize_4bit is held[0]
        assert not held[1].__globals__["switch"].on
        assert not reader.cache.entries and not reader.cache.on  # it would hold its weights for good
    nf4_patch.enable()
    held[1:] = [F.dequantize_4bit]
    nf4_patch = again()
    nf4_patch.enable()
    assert F.dequantize_4bit is not held[1] and F.dequantize_4bit.__wrapped__ is held[0]
    nf4_patch.disable()
    assert F.dequantize_4bit is held[0]
    """, interpreted=True)  # fmt: skip
