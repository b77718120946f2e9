"""Mixtures of experts at real size (two layers) on the GPU: a hundred steps to the bit, and the dense stacks not saved; and their loading."""

from __future__ import annotations

import bitsandbytes.functional as F
import pytest
import torch
from tiny_experts import in_4bit, loaded, random_model, saved

import nf4_patch
from benchmarks import experts
from nf4_patch.tools.bench import step

pytestmark = pytest.mark.gpu


def train(model, patch: bool, steps: int, cache: str = "off"):
    """Losses, adapters and the peak memory of a step."""
    nf4_patch.enable(cache=cache) if patch else nf4_patch.disable()
    adapters = step.optimizer_of(model).param_groups[0]["params"]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    losses = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        tokens = torch.randint(3, 1000, (1, 512), generator=generator).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    nf4_patch.disable()
    return torch.stack(losses), [a.detach().clone() for a in adapters], torch.cuda.max_memory_allocated()


@pytest.mark.slow
@pytest.mark.parametrize("name", experts.CONFIGURATIONS)
def test_a_hundred_steps_to_the_bit_and_nothing_dense_is_saved(name):
    model = step.peft_model(experts.CONFIGURATIONS[name](), experts.ATTENTION)
    model.get_base_model().set_attn_implementation("eager")  # cuDNN's backward may not repeat next to other work (H200)
    for checkpointing in (True, False):
        if not checkpointing:
            model.gradient_checkpointing_disable()
        want, trained, stock = train(model, False, 100)
        got, ours, peak = train(model, True, 100)
        if not torch.equal(got, want):
            assert torch.equal(train(model, False, 100)[0], want), "it does not repeat without the patch either"
        print(f"\n{name}, checkpointing {checkpointing}: peak {stock / 2**30:.2f} -> {peak / 2**30:.2f} GiB")
        assert torch.equal(got, want)
        assert all(map(torch.equal, ours, trained))
        hits = nf4_patch.status().cache.hits
        got, ours, _ = train(model, True, 100, cache="8GiB")  # all of them fit
        assert nf4_patch.status().cache.hits > hits
        assert torch.equal(got, want)
        assert all(map(torch.equal, ours, trained))
        assert want[-1] != want[0]
        stacks = [
            2 * chain[0].quant_state.shape.numel()
            for module in model.modules()
            for chain in getattr(module, "parametrizations", {}).values()
        ]
        in_use = max(stacks)  # one is dense at a time
        assert peak <= 1.001 * (stock if checkpointing else stock - sum(stacks) + in_use)


SIZES = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}


# Packed while transformers loads them: the same bits as on the CPU, and no more memory than promised.
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("places", [{"": 0}, "auto"], ids=str)
def test_packed_while_loading(name, places, tmp_path):
    """The packed model, two stacks in 16 bits and an eighth of one: nothing else is ever on the GPU."""
    sizes = SIZES if name == "qwen3" else {"hidden_size": 1024, "intermediate_size": 512, "num_local_experts": 32}
    stacks = saved(random_model(name, **sizes), tmp_path)
    largest = max(stack.nbytes for stack in stacks.values())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with nf4_patch.enabled(experts="4bit"):
        model = loaded(tmp_path, quantization_config=in_4bit(), device_map=places)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    if torch.cuda.device_count() == 1:
        assert held < sum(stack.nbytes for stack in stacks.values()) / 3
        assert peak <= held + 2.125 * largest
    for stack, dense in stacks.items():
        path, _, parameter = stack.rpartition(".")
        chain = model.get_submodule(path).parametrizations[parameter]
        packed, _ = F.quantize_4bit(dense.to(chain.original.device), compress_statistics=True, quant_type="nf4")
        assert torch.equal(chain.original, packed)
    ids = torch.arange(24, device="cuda").view(2, 12)
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_packed_bytes_are_no_numbers(storage, tmp_path):
    """Neither for ``prepare_model_for_kbit_training`` nor for a journey to the host and back."""
    from peft import prepare_model_for_kbit_training

    saved(random_model("qwen3"), tmp_path)
    ids = torch.arange(24, device="cuda").view(2, 12)

    def logits(stored, journey=lambda model: model):
        with nf4_patch.enabled(experts="4bit"), torch.no_grad():
            config = in_4bit(bnb_4bit_quant_storage=stored)
            model = loaded(tmp_path, quantization_config=config, device_map={"": 0})
            return journey(prepare_model_for_kbit_training(model))(ids).logits

    wanted = logits(torch.uint8)
    assert torch.equal(logits(storage), wanted)
    assert torch.equal(logits(storage, lambda model: model.cpu().cuda()), wanted)


def test_experts_that_were_packed_one_by_one(tmp_path):
    """A stack of what bitsandbytes' kernels decode each expert to."""
    from safetensors.torch import load_file, save_file

    saved(random_model("qwen3"), tmp_path)
    loaded(tmp_path, quantization_config=in_4bit(), device_map={"": 0}).save_pretrained(tmp_path)
    weights, decoded = load_file(tmp_path / "model.safetensors"), {}
    for key in [key for key in weights if ".experts." in key]:
        packed, state = F.quantize_4bit(weights.pop(key).cuda(), compress_statistics=True, quant_type="nf4")
        weights[key], decoded[key] = packed, F.dequantize_4bit(packed, state)
        weights |= {f"{key}.{field}": value for field, value in state.as_dict(packed=True).items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with nf4_patch.enabled(experts="4bit"):
        experts = loaded(tmp_path, device_map={"": 0}).model.layers[0].mlp.experts
    for expert in range(6):
        parts = [decoded[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] for part in ("gate_proj", "up_proj")]
        assert torch.equal(experts.gate_up_proj[expert], torch.cat(parts))
