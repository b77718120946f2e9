"""Unsloth's compiled layers, eagerly and as CUDA graphs. Losses and adapters are bit-identical, in two trainings each.

graphed_unsloth.py [unsloth] [mixture] # with PyTorch's checkpoint, or with Unsloth's own, its default
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import unsloth  # before transformers, as Unsloth requires

import torch
from transformers import Qwen3MoeConfig

import nf4_patch
from nf4_patch.patching.counters import counters
from benchmarks.kinds import unsloth_model
from benchmarks.models import Shape, config_of
from benchmarks.sides import LAYERS
from benchmarks.training import optimizer_of, trained

if "mixture" in sys.argv:
    config = Qwen3MoeConfig(
        hidden_size=1024, moe_intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=128, num_experts=32, num_experts_per_tok=8, vocab_size=4096, max_position_embeddings=1024,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
else:
    config = config_of(Shape(1024, 2816, 3, 8, 4, vocab_size=4096))
model = unsloth_model(config, "unsloth" if "unsloth" in sys.argv else True)
tokens = [torch.randint(3, 4000, (2, 256), generator=torch.Generator().manual_seed(s)).cuda() for s in range(10)]


def training(**options):
    optimizer, losses = optimizer_of(model, lr=1e-3), []  # sets the adapters to the same numbers
    loss = None
    counters.reset()
    with nf4_patch.enabled(**options):
        before = nf4_patch.status().graphs.replays
        for batch in tokens:
            optimizer.zero_grad(set_to_none=True)
            del loss  # without graphs, it still holds memory of the latest step
            allocated = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            kept = torch.cuda.memory_allocated() - allocated  # between forward and backward
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        status = nf4_patch.status()
        replays = status.graphs.replays - before
        reasons = {reason for target in status.targets if target.name == LAYERS for reason in target.fallbacks}
        assert reasons <= {"GRAPH_NEW_SHAPE"}, reasons  # no backward recomputed eagerly
    return losses, [parameter.detach().clone() for parameter in trained(model)], replays, kept


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


training()  # compiles
want = training()
assert same(training(), want), "two eager trainings differ"
for _ in range(2):
    found = training(graphs="auto")
    assert found[2] == 3 * (len(tokens) - 2), found[2]
    assert same(found, want), (found[0], want[0])
    assert found[3] <= want[3], (found[3], want[3])
print("equal")
