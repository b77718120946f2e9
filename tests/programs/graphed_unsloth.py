"""Unsloth's compiled layers, eagerly and as CUDA graphs: the same losses and adapters, to the bit.

With PyTorch's math attention, because gradients of flash attention differ between two runs of the same step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import unsloth  # before transformers, as Unsloth requires

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import nf4_patch
from benchmarks.models import Shape, config_of
from benchmarks.step import unsloth_model
from benchmarks.training import optimizer_of, trained

model = unsloth_model(config_of(Shape(1024, 2816, 3, 8, 4, vocab_size=4096)))
tokens = [torch.randint(3, 4000, (2, 256), generator=torch.Generator().manual_seed(s)).cuda() for s in range(8)]


def training(**options):
    optimizer, losses = optimizer_of(model, lr=1e-3), []
    with nf4_patch.enabled(**options), sdpa_kernel(SDPBackend.MATH):
        for batch in tokens:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        replays = nf4_patch.status().graphs.replays
    return losses, [parameter.detach().clone() for parameter in trained(model)], replays


training()  # compiles
want, again = training(), training()
assert again[0] == want[0] and all(map(torch.equal, again[1], want[1])), "two eager runs differ"
found = training(graphs="auto")
print("losses", found[0] == want[0], "adapters", sum(map(torch.equal, found[1], want[1])), "of", len(want[1]), found[2])
assert found[2] >= 3 * (len(tokens) - 3), found[2]
assert found[0] == want[0] and all(map(torch.equal, found[1], want[1]))
print("equal")
