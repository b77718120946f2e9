"""Mixtures of experts at real size (two layers) on the GPU: a hundred steps to the bit, and the dense stacks not saved."""

from __future__ import annotations

import pytest
import torch

import nf4_patch
from benchmarks import experts
from nf4_patch.tools.bench import step

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


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
