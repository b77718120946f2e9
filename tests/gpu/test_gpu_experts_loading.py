"""Experts packed on the GPU while transformers loads them: the same bits as on the CPU, and no more memory than promised."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("bitsandbytes.nn.parametrize", reason="bitsandbytes before 0.46")

import bitsandbytes.functional as F
from tiny_experts import in_4bit, loaded, random_model, saved

import nf4_patch

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}


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
