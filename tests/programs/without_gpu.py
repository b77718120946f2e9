"""Turn every option on where no weight is on a GPU: ``without_gpu.py FOLDER [unsloth]``. The originals run, under their Reasons.

Nothing is interpreted, and no function of ``runtime`` is replaced, because a CPU build of PyTorch lacks some functions
that it calls.
"""

import sys

import torch

import nf4_patch

folder, *unsloth = sys.argv[1:]
if unsloth:
    import unsloth
    from unsloth.kernels import fast_lora, utils
import bitsandbytes as bnb
import bitsandbytes.functional as F
import peft
import tiny_experts
from torch.utils.checkpoint import checkpoint

tiny_experts.DEVICE = CPU = torch.device("cpu")
OPTIONS = {"matmul": "auto", "cache": "6GB", "experts": "4bit", "lora": "fused", "offload": "6GB"}
EXPECTED = {"NOT_CUDA", *["LORA_REPLACED"] * bool(unsloth)}  # Unsloth replaces forwards of peft's


def dense():
    """Run a peft model of two layers: outputs and gradients of few rows and of many, with every way to call it."""
    torch.manual_seed(0)
    layers = [bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.bfloat16) for _ in range(2)]
    base = torch.nn.Sequential(*layers).bfloat16().to(CPU)
    base.is_loaded_in_4bit = True
    lora = peft.LoraConfig(target_modules=["0", "1"], r=4, init_lora_weights="gaussian")
    model, found = peft.get_peft_model(base, lora).train(), []
    for rows in (1, 8, 600):
        for reentrant in (None, True, False):
            x = torch.linspace(-1, 1, rows * 256).view(rows, 256).bfloat16().requires_grad_()
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            y.float().square().sum().backward()
            found += [y.detach(), x.grad]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found.append(model(x.detach()).clone())
    packed = layers[0].weight
    whole = F.dequantize_4bit(packed, packed.quant_state)
    assert torch.equal(nf4_patch.dequantize_nf4(packed, packed.quant_state), whole)
    if unsloth:
        parts = packed, packed.quant_state, torch.ones(4, 256).bfloat16(), torch.ones(256, 4).bfloat16(), 0.5
        x = torch.ones(2, 8, 256, dtype=torch.bfloat16, requires_grad=True)
        fast_lora.LoRA_W.apply(x, *parts).float().sum().backward()
        found += [x.grad, utils.fast_dequantize(*parts[:2])]  # and its fast_gemv asks CUDA before it multiplies
    return [*found, whole]


def experts():
    model = tiny_experts.with_lora(tiny_experts.loaded(folder, quantization_config=tiny_experts.in_4bit()))
    return [*tiny_experts.step(model.train()).values()]


tiny_experts.random_model("qwen3").save_pretrained(folder)
want = dense()
for chosen in (
    {},
    *({name: value} for name, value in OPTIONS.items() if name != "offload"),
    {"cache": "auto"},
    OPTIONS,
):
    with nf4_patch.enabled(**chosen):
        assert all(map(torch.equal, dense(), want)), chosen
        if "experts" in chosen and not unsloth:  # which calls experts in its own way
            assert all(each.isfinite().all() for each in experts())
        nf4_patch.release()
        status = nf4_patch.status()
        assert status.hits == 0 and not status.errors and not status.cache.weights, status
        assert {why for target in status.targets for why in target.fallbacks} <= EXPECTED, status
        assert not status.cache.uncached, status  # what no kernel decodes is no read of the cache
print(status)
