"""Liger replaces classes of transformers and nothing of ours: ``liger.py nf4_patch|liger``, whoever comes first."""

import sys

import torch
import bitsandbytes as bnb
import nf4_patch
from liger_kernel.transformers import apply_liger_kernel_to_llama

steps = [nf4_patch.enable, apply_liger_kernel_to_llama]
for step in steps if sys.argv[1] == "nf4_patch" else steps[::-1]:
    step()
from transformers.models.llama import modeling_llama
from transformers import LlamaConfig

assert "liger" in modeling_llama.LlamaMLP.__module__
torch.manual_seed(0)
mlp = modeling_llama.LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=128, hidden_act="silu"))
linear = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.float16)
mlp.down_proj = linear.to("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(300, 128, dtype=torch.float16, device=mlp.down_proj.weight.device, requires_grad=True)


def gradient():
    x.grad = None
    mlp.down_proj(x).float().sum().backward()
    return x.grad.clone()


got, hits = gradient(), nf4_patch.status().hits
assert hits >= 1, nf4_patch.status()
nf4_patch.disable()
assert torch.equal(gradient(), got) and nf4_patch.status().hits == hits
assert "liger" in modeling_llama.LlamaMLP.__module__
