"""Behaviour that every release of the patched libraries must keep. scripts/release_matrix.py runs these tests with each release.

Without a GPU, the kernels are compared with the formula. bitsandbytes has CPU code since 0.46. Before 0.50, it raises
errors for odd sizes, and from 0.47 to 0.49, some of its bits differ.
"""

from __future__ import annotations

import gc
import os
from importlib import metadata

import pytest
import torch
from fuzz import drawn, random_state, same, states

import nf4_patch
from nf4_patch.nf4.dequantize import reference
from nf4_patch.patching import option, placement
from nf4_patch.patching.counters import counters
from nf4_patch.patching.quant_state import weight_of
from nf4_patch.patching.targets import TARGETS
from nf4_patch.version import holds, release_of

bnb = pytest.importorskip("bitsandbytes")
BITSANDBYTES = tuple(map(int, metadata.version("bitsandbytes").split(".")[:2]))
OPTIONS = {"quant_type": "nf4", "compute_dtype": torch.bfloat16}
packs = pytest.mark.skipif(
    BITSANDBYTES < (0, 46) and not torch.cuda.is_available(), reason="bitsandbytes before 0.46 packs nothing on a CPU"
)


def counted() -> int:
    return sum(counters.hits(target.name) for target in nf4_patch.status().targets)


def test_no_target_of_this_release_is_refused(patched):
    import bitsandbytes.functional  # noqa: F401

    rows = {target.name: target for target in TARGETS}
    refused = [rows[target.name] for target in patched.status().targets if target.state == "refused"]
    assert [row.name for row in refused if holds(release_of(row.library), row.releases)] == []


def test_targets_of_other_releases_are_left_alone(patched):
    pytest.importorskip("transformers.generation.utils")
    rows = {target.name: target for target in TARGETS}
    placed = [rows[name] for name, entry in placement.installed.items() if entry.pairs]
    assert placed and all(holds(release_of(row.library), row.releases) for row in placed)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_with_graphs(cache, device):
    transformers = pytest.importorskip("transformers")
    if option.OPTIONS["graphs"].lacks():
        pytest.skip("graphs need a newer transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(device).eval()
    ids = torch.arange(12, device=device).view(2, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **options)
    with nf4_patch.enabled(graphs="auto"):
        found = model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **options)
    assert torch.equal(found, expected)


def test_random_states(device, patched, every_launch_interpreted):
    """Dequantize through the patched dequantize_4bit. Every call runs in the kernel.

    The bits are the original's on a GPU, and the formula's on a CPU.
    """
    import bitsandbytes.functional as F

    cases = drawn(60, 11, states(device.type, (64, 128, 4096)))
    cases = [case for case in cases if case.start % 4 == 0 and (device.type == "cuda" or case.storage is torch.uint8)]
    assert len(cases) > 15
    for case in cases:
        packed, state = random_state(case, device)
        want = reference.dequantize(weight_of(packed, state))
        if device.type == "cuda":
            nf4_patch.disable()
            want = F.dequantize_4bit(packed, state)
            nf4_patch.enable()
        assert same(F.dequantize_4bit(packed, state), want), case
    assert counters.hits("bitsandbytes.functional.dequantize_4bit") == len(cases)


@packs
def test_a_step_of_peft(device):
    """Compare output and gradients of a checkpointed LoRA step over two Linear4bit, with the patch and without."""
    peft = pytest.importorskip("peft")

    def once() -> list[torch.Tensor]:
        torch.manual_seed(0)
        base = torch.nn.Sequential(
            bnb.nn.Linear4bit(256, 384, bias=True, **OPTIONS),
            torch.nn.SiLU(),
            bnb.nn.Linear4bit(384, 128, bias=False, compress_statistics=False, **OPTIONS),
        ).to(device)
        base.is_loaded_in_4bit = True
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights="gaussian"))
        x = torch.randn(2048, 256, device=device, dtype=torch.bfloat16).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(model.to(device), x, use_reentrant=False)
        y.float().square().mean().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    want = once()
    with nf4_patch.enabled():
        got = once()
        assert counted() >= 2  # the backward of each layer at least
    assert len(got) == len(want) == 6 and all(map(torch.equal, got, want))


@packs
def test_a_garbage_collection_leaves_the_cached_weights(device):
    """A cached weight belongs to a parameter that is still alive."""
    layer = bnb.nn.Linear4bit(256, 128, bias=False, **OPTIONS).to(device)
    x = torch.randn(2048, 256, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> list[torch.Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), x)]

    want = step()
    with nf4_patch.enabled(cache="1GiB"):
        assert all(map(torch.equal, step(), want))
        kept = nf4_patch.status().cache.weights  # one a dtype: a forward may decode in another than its backward
        assert kept
        gc.collect()
        assert nf4_patch.status().cache.weights == kept
        hits = nf4_patch.status().cache.hits
        assert all(map(torch.equal, step(), want))
        assert nf4_patch.status().cache.hits > hits


@pytest.mark.skipif(BITSANDBYTES < (0, 48), reason="bitsandbytes before 0.48 packs no experts")
def test_a_step_of_experts(device):
    """Compare output and gradient of a mixture's packed experts, with the patch and without."""
    pytest.importorskip("transformers.integrations.moe", reason="transformers before 5.0 calls experts in its own way")
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    # bf16 on a CPU from 0.50 on only: bitsandbytes 0.48 rounds it otherwise there.
    dtype = torch.float32 if device.type == "cpu" and BITSANDBYTES < (0, 50) else torch.bfloat16
    experts = Qwen3MoeExperts(config).to(device, dtype)
    torch.manual_seed(0)
    for name, parameter in list(experts.named_parameters()):
        torch.nn.init.normal_(parameter)
        replace_parameter_4bit(experts, name, compress_statistics=True)

    def once() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(16, 128, device=device, dtype=dtype).requires_grad_()
        scores, chosen = torch.randn(16, 4, device=device).softmax(-1).topk(2)
        y = experts(x, chosen, scores.to(x.dtype))
        y.float().square().mean().backward()
        return [y.detach(), x.grad]

    want = once()
    with nf4_patch.enabled():
        assert all(map(torch.equal, once(), want))
        assert counted() >= 2


@pytest.mark.skipif(not os.environ.get("TEST_UNSLOTH"), reason="Unsloth patches other libraries when it is imported")
def test_a_layer_of_unsloth(device):
    """Compare Unsloth's fast_dequantize and its LoRA autograd function with bitsandbytes without the patch."""
    import bitsandbytes.functional as F
    from unsloth.kernels import fast_lora, utils

    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 512, bias=False, **OPTIONS).bfloat16().to(device)
    weight, state = layer.weight, layer.weight.quant_state
    want = F.dequantize_4bit(weight, state)
    x = torch.randn(2, 8, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    A = torch.randn(4, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    B = torch.zeros(512, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    with nf4_patch.enabled():
        assert torch.equal(utils.fast_dequantize(weight, state), want)
        assert torch.equal(fast_lora.fast_dequantize(weight.t(), state, use_global_buffer=True), want.t())
        y = fast_lora.LoRA_W.apply(x, weight, state, A, B, 0.5)
        assert torch.equal(y, torch.nn.functional.linear(x, want))  # B is zero: the frozen part alone
        y.float().square().mean().backward()
        assert torch.isfinite(x.grad).all() and counted() >= 3
