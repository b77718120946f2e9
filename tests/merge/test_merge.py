"""merge="reversible": after unmerging, a 4-bit linear layer has its earlier bytes, in the same tensors."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from interrupts import interrupted_at_every_line
from target import fallbacks

import nf4_patch
from nf4_patch.libraries.peft import merge as merging
from nf4_patch.nf4.identity import Identity
from nf4_patch.patching.counters import counters

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:(Merge|Unmerge|Already)")
TARGET = "peft.tuners.lora.bnb.Linear4bit"
KINDS = {
    "nested": {}, "flat": {"compress_statistics": False}, "fp4": {"quant_type": "fp4"},
    "packed in bf16": {"quant_storage": torch.bfloat16}, "bias": {"bias": True},
}  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, device, **options):
        super().__init__()
        self.config = {"model_type": "custom"}
        self.is_loaded_in_4bit = True
        for index in range(2):
            self.add_module(f"fc{index}", made(device, index, **options))

    def forward(self, x):
        return self.fc1(self.fc0(x))


def made(device, seed, bias=False, **options):
    import bitsandbytes as bnb

    torch.manual_seed(seed)
    layer = bnb.nn.Linear4bit(128, 128, bias=bias, compute_dtype=torch.bfloat16, **{"quant_type": "nf4"} | options)
    layer.weight = bnb.nn.Params4bit(
        torch.randn(128, 128), requires_grad=False, module=layer,
        **{"quant_type": "nf4", "compress_statistics": True} | options,
    )  # fmt: skip
    return layer.to(device)


def adapted(device, adapters=("default",), lora_bias=False, **options):
    config = peft.LoraConfig(r=8, target_modules=["fc0", "fc1"], init_lora_weights=False, lora_bias=lora_bias)
    model = peft.get_peft_model(Model(device, **options), config)
    for name in adapters[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(list(adapters))
    return model.to(device)


def bases(model):
    return [module.get_base_layer() for module in model.modules() if hasattr(module, "get_base_layer")]


def content(model):
    """Return all bytes that affect the linear layers' results."""
    found = []
    for base in bases(model):
        state = base.weight.quant_state
        parts = [base.weight.detach().as_subclass(torch.Tensor).view(torch.uint8), state.absmax]
        parts += [state.offset, state.state2.absmax] if state.nested else []
        found += [part.clone() for part in [*parts, *([base.bias] if base.bias is not None else [])]]
    return found


def identity(model):
    found = []
    for base in bases(model):
        assert base.quant_state is base.weight.quant_state and base.weight.bnb_quantized
        found += [id(base.weight), id(base.quant_state), base.weight.data_ptr(), base.quant_state.absmax.data_ptr()]
    return found


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture
def on(device):
    nf4_patch.enable(merge="reversible")
    return device


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [("default",), ("default", "other")])
def test_five_syncs_change_no_byte(on, kind, adapters):
    model = adapted(on, adapters, **KINDS[kind])
    x = torch.randn(4, 128, device=on, dtype=torch.bfloat16)
    result = model(x)  # casts the bias
    before, where = content(model), identity(model)
    for _ in range(5):
        model.merge_adapter()
        assert not equal(content(model), before) and identity(model) == where
        model.unmerge_adapter()
        assert equal(content(model), before) and identity(model) == where
    assert torch.equal(model(x), result) and not fallbacks(f"{TARGET}.unmerge")


def test_merged_bytes_are_those_of_peft(device):
    model, stock = adapted(device, ("default", "other")), adapted(device, ("default", "other"))
    with nf4_patch.enabled(merge="reversible"):
        model.load_state_dict(stock.state_dict(), strict=False)
        for module, other in zip(model.modules(), stock.modules(), strict=True):
            if hasattr(module, "lora_A"):
                for name in module.lora_A:
                    module.lora_A[name].weight.data = other.lora_A[name].weight.data.clone()
                    module.lora_B[name].weight.data = other.lora_B[name].weight.data.clone()
        model.merge_adapter()
    stock.merge_adapter()
    assert equal(content(model), content(stock))


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("unmerge", [True, False])
def test_inference_mode(on, merge, unmerge):
    """Training could not use tensors that a merge or unmerge in inference mode had made."""
    model = adapted(on)
    before, where = content(model), identity(model)
    with torch.inference_mode(merge):
        model.merge_adapter()
    assert not any(torch.equal(*each) for each in zip(content(model)[:1], before[:1], strict=True))
    with torch.inference_mode(unmerge):
        model.unmerge_adapter()
    assert all(torch.equal(*each) for each in zip(content(model), before, strict=True)) and identity(model) == where


def test_dora_after_another_adapter(on):
    """peft's merge of DoRA unmerges the layer in between."""
    model = adapted(on)
    model.add_adapter(
        "dora", peft.LoraConfig(r=8, target_modules=["fc0", "fc1"], use_dora=True, init_lora_weights=False)
    )
    model.base_model.set_adapter(["default", "dora"])
    before, where = content(model), identity(model)
    model.merge_adapter()
    model.unmerge_adapter()
    assert all(torch.equal(*each) for each in zip(content(model), before, strict=True)) and identity(model) == where


def test_without_the_option_bytes_change(device):
    with nf4_patch.enabled():
        model = adapted(device)
        before = content(model)
        model.merge_adapter()
        model.unmerge_adapter()
        assert not equal(content(model), before)


def test_a_bias_in_lora(on):
    model = adapted(on, lora_bias=True, bias=True)
    before = content(model)
    for _ in range(2):
        model.merge_adapter()
        model.unmerge_adapter()
        assert equal(content(model), before)


def test_a_trained_bias_stays_trained(on):
    model = adapted(on, bias=True)
    for step in range(2):
        with torch.no_grad():
            for base in bases(model):
                base.bias += step + 1
        before = content(model)
        model.merge_adapter()
        model.unmerge_adapter()
        assert equal(content(model), before)


def test_weights_are_swapped_after_unmerging(on):
    """PyTorch refuses to swap tensors with weak references."""
    model, other = adapted(on), adapted(on)
    model.merge_adapter()
    model.unmerge_adapter()
    for base, theirs in zip(bases(model), bases(other), strict=True):
        torch.utils.swap_tensors(base.weight, theirs.weight)
        torch.utils.swap_tensors(base.weight.quant_state.absmax, theirs.weight.quant_state.absmax)
    before = content(model)
    model.merge_adapter()
    model.unmerge_adapter()
    assert equal(content(model), before)


def test_disable_adapter_restores(on):
    model = adapted(on)
    x = torch.randn(4, 128, device=on, dtype=torch.bfloat16)
    before = content(model)
    with model.disable_adapter():
        plain = model(x)
    model.merge_adapter()
    with model.disable_adapter():  # peft unmerges in the forward
        assert torch.equal(model(x), plain)
    assert equal(content(model), before)


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_of_a_merged_model(on, inference):
    model = adapted(on)
    before = content(model)
    model.merge_adapter()
    with torch.inference_mode(inference):
        other = copy.deepcopy(model)
    for each in (other, model):
        each.unmerge_adapter()
        assert equal(content(each), before) is (each is model or not inference)


def test_status_says_how_many_layers_were_restored(on, caplog):
    model = adapted(on)
    assert 'merge="reversible": no unmerged layers yet' in str(nf4_patch.status())
    model.merge_adapter()
    for base in bases(model)[:1]:
        base.weight.detach().as_subclass(torch.Tensor).view(torch.uint8).bitwise_xor_(1)
    model.unmerge_adapter()
    effect = nf4_patch.status().options["merge"]
    assert (effect.used, effect.refused) == (1, {"MERGE_CHANGED": 1})
    assert 'merge="reversible": 1 of 2 unmerged layers, because 1 x MERGE_CHANGED' in str(nf4_patch.status())
    assert len([each for each in caplog.records if "MERGE_CHANGED" in each.message]) == 1


def test_what_is_no_launch_counts_for_its_own_option(on):
    """A dequantization that was corrected on a CPU does not count as a fused product. A merge counts as a use of the patch."""
    counters.of("test", (1152, 4304), "bfloat16", "on the CPU").hits += 1
    nf4_patch.enable(matmul="auto")
    assert nf4_patch.status().options["matmul"].used == 0
    counters.reset()
    assert not counters.anything()
    model = adapted(on)
    model.merge_adapter()
    model.unmerge_adapter()
    counters.fallbacks.clear()
    assert nf4_patch.status().options["merge"].used == 2 and counters.anything()


def test_a_changed_merged_weight_is_not_restored(on):
    model = adapted(on)
    before = content(model)
    model.merge_adapter()
    for base in bases(model):
        base.weight.detach().as_subclass(torch.Tensor).view(torch.uint8).bitwise_xor_(1)
    model.unmerge_adapter()
    assert not equal(content(model), before)


def test_a_model_made_in_inference_mode_is_merged_by_peft(on):
    """PyTorch refuses writes into such tensors outside inference mode, and counts no versions of them."""
    with torch.inference_mode():
        model = adapted(on)
    before = content(model)
    model.merge_adapter()
    assert not equal(content(model), before)
    model.unmerge_adapter()


def test_merged_before_the_option(device):
    model = adapted(device)
    model.merge_adapter()
    with nf4_patch.enabled(merge="reversible"):
        model.unmerge_adapter()
        before = content(model)
        model.merge_adapter()
        model.unmerge_adapter()
        assert equal(content(model), before)


def test_switched_off_while_merged(device):
    model = adapted(device)
    with nf4_patch.enabled(merge="reversible"):
        model.merge_adapter()
    model.unmerge_adapter()
    with nf4_patch.enabled(merge="reversible"):
        before = content(model)
        model.merge_adapter()
        model.unmerge_adapter()
        assert equal(content(model), before)


def test_an_adapter_that_is_broken(on):
    model = adapted(on, ("default", "broken"))
    before = content(model)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["broken"].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="broken"):
        model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    assert equal(content(model), before)


@pytest.mark.parametrize("option", [{"merge": "reversible"}, {"offload": "all"}], ids=str)
def test_layers_that_share_a_weight(device, option):
    """``layer_replication`` makes such layers. A merge into one layer must not change the other."""

    def merged():
        torch.manual_seed(0)
        model = Model(device)
        model.fc1.weight = model.fc0.weight
        config = peft.LoraConfig(r=8, target_modules=["fc0", "fc1"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        model.merge_adapter()
        contents = [content(model)]
        model.unmerge_adapter()
        return [*contents, content(model)]

    want = merged()
    with nf4_patch.enabled(**option):
        got = merged()
    assert equal(got[0], want[0])
    if "merge" not in option:
        assert equal(got[1], want[1])


def test_layers_that_share_a_weight_since_another_model_was_merged(on):
    first, second = adapted(on), adapted(on)
    first.merge_adapter()
    model = second.unload()
    model.fc1.weight = model.fc0.weight
    config = peft.LoraConfig(r=8, target_modules=["fc0"], init_lora_weights=False)
    second = peft.get_peft_model(model, config)
    before = content(second)
    other = model.fc1.weight.detach().clone()
    second.merge_adapter()
    assert torch.equal(model.fc1.weight.detach(), other) and not equal(content(second), before)


def test_merge_and_unload(on):
    model = adapted(on)
    model.merge_adapter()
    merged = content(model)
    model.unmerge_adapter()
    unloaded = model.merge_and_unload()
    state = [
        each for base in (unloaded.fc0, unloaded.fc1) for each in (base.weight.detach().as_subclass(torch.Tensor),)
    ]
    assert equal([each.view(torch.uint8) for each in state], [merged[0], merged[4]])


def test_an_interrupted_unmerge_is_repeated(on):
    model = adapted(on, bias=True, lora_bias=True)
    before = content(model)
    unmerge = merging.unmerge.__closure__[0].cell_contents
    reached = []
    for where in interrupted_at_every_line(
        model.unmerge_adapter, merging.Parts.copy_, merging.Unmerged.mark, Identity.__init__, unmerge,
        before=model.merge_adapter,
    ):  # fmt: skip
        reached.append(where)
        model.unmerge_adapter()
        assert equal(content(model), before), where
    assert len(reached) > 10


def test_a_pickled_model_has_no_bytes_of_ours(on):
    model = adapted(on)
    model.merge_adapter()
    file = io.BytesIO()
    torch.save(model, file)
    assert b"nf4_patch.merge" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert equal(content(loaded), content(model))
