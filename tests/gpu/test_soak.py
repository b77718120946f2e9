"""Ten thousand steps, with the patch toggled every 500: losses are bit-identical to a run without the patch, and memory
does not grow.
"""

from __future__ import annotations

import gc
import os
import resource

import bitsandbytes as bnb
import peft
import pytest
import torch

import nf4_patch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STEPS, TOGGLE = int(os.environ.get("NF4_SOAK_STEPS", 10_000)), 500
CUDA = torch.device("cuda", 0)
ROWS = 64  # above bitsandbytes' own fused kernel: its forward dequantizes


def model():
    torch.manual_seed(0)
    base = torch.nn.Sequential(bnb.nn.Linear4bit(512, 512, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16))
    base = base.to(CUDA)
    base.is_loaded_in_4bit = True
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=4)).train()


def train(toggle: bool) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return the losses, fp32 [STEPS], and (allocated GPU bytes, peak host KiB) after every TOGGLE steps."""
    network = model()
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)
    generator = torch.Generator(CUDA).manual_seed(2)
    batches = torch.randn(8, ROWS, 512, device=CUDA, generator=generator, dtype=torch.bfloat16)
    losses = torch.empty(STEPS, device=CUDA)
    memory = []
    for step in range(STEPS):
        if toggle and step % TOGGLE == 0:
            (nf4_patch.disable if step // TOGGLE % 2 else nf4_patch.enable)()
        x = batches[step % 8].clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(network, x, use_reentrant=False)
        loss = (y.float() - x.detach().float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses[step] = loss.detach()
        del x, y, loss
        if step % TOGGLE == TOGGLE - 1:
            torch.cuda.synchronize()
            gc.collect()
            memory.append((torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    return losses, memory


def test_soak():
    without, _ = train(toggle=False)
    assert nf4_patch.status().hits == 0
    toggled, memory = train(toggle=True)
    status = nf4_patch.status()
    assert torch.isfinite(without).all()
    assert without[-1] < without[0]
    assert torch.equal(without, toggled)
    # a checkpointed step: forward, recomputed, backward; every other 500 steps are patched
    patched_steps = sum(min(TOGGLE, STEPS - s) for s in range(0, STEPS, 2 * TOGGLE))
    assert status.hits >= 2 * patched_steps, status
    assert status.fallbacks == 0, status
    allocated = [a for a, _ in memory]
    assert max(allocated) - min(allocated[:2]) <= 1 << 16, allocated  # 64 KiB: the codebooks
    host = [h for _, h in memory]
    assert host[-1] - host[1] <= 32 << 10, host
