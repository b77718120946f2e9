"""A training of Unsloth's compiled layers with the cache and without: losses and adapters are equal to the bit.

``pinned_training.py CHECKPOINTING STEPS``: "0", "1" or "unsloth". In between the weights are loaded, moved and quantized
again (as a merge does), and the model generates.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import nf4_patch
import unsloth
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import checkpoint
from nf4_patch.cache.store import cache
from nf4_patch.tools import llama

TOKENS, LAYERS = 256, 4
checkpointing = {"0": False, "1": True}.get(sys.argv[1], sys.argv[1])
steps = int(sys.argv[2])
folder = tempfile.mkdtemp()
checkpoint.save(folder, llama.Shape(1024, 2816, LAYERS, 8, 4, vocab_size=1024))


def load():
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        folder, max_seq_length=TOKENS, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True
    )
    return unsloth.FastLanguageModel.get_peft_model(
        model, r=16, target_modules=list(llama.LINEARS), lora_alpha=16, lora_dropout=0, bias="none",
        use_gradient_checkpointing=checkpointing, random_state=3407,
    )  # fmt: skip


def layers(model):
    return model.base_model.model.model.layers


def generate(model):
    unsloth.FastLanguageModel.for_inference(model)
    tokens = torch.arange(4, 12, device="cuda")[None]
    model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    unsloth.FastLanguageModel.for_training(model, use_gradient_checkpointing=checkpointing)


def reload(model):
    model.load_state_dict(model.state_dict(), strict=False)


def move(model):
    layers(model)[0].to("cpu").to("cuda")


def quantize(model):
    projection = layers(model)[1].mlp.up_proj.base_layer
    dense = torch.randn(projection.out_features, projection.in_features, dtype=torch.bfloat16, device="cuda") / 32
    projection.weight = type(projection.weight)(
        dense, requires_grad=False, quant_type="nf4", compress_statistics=True, module=projection
    ).cuda()


EVENTS = [generate, reload, move, quantize, generate]


def train(budget):
    torch.manual_seed(0)
    model = load()
    model.train()
    nf4_patch.enable(cache=budget)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses, held = [], []
    for number in range(steps):
        part, rest = divmod(number, steps // (len(EVENTS) + 1))
        if rest == 0 and 0 < part <= len(EVENTS):
            torch.manual_seed(part)
            EVENTS[part - 1](model)
        tokens = torch.randint(4, 1024, (1, TOKENS - 16 * (number % 3)), generator=generator).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        held.append(nf4_patch.status().cache.compiled)
    return (
        losses,
        [p.detach().clone() for p in model.parameters() if p.requires_grad],
        held,
        max(cache.taken.values(), default=0),
    )


want, adapters, _, _ = train("off")
assert len(set(want)) == steps
_, _, held, size = train(2**40)
for budget, expected in ((2**40, 7 * LAYERS), (size // 2, 7 * LAYERS // 2)):
    losses, trained, held, _ = train(budget)
    differ = [number for number, (a, b) in enumerate(zip(losses, want, strict=True)) if a != b]
    print(budget, "held", sorted(set(held)), "differ", differ[:5], nf4_patch.status().cache)
    assert losses == want
    assert all(map(torch.equal, trained, adapters))
    assert held[-1] == expected, held
from torch._dynamo.utils import counters

print("graphs", counters["stats"]["unique_graphs"], "breaks", sum(counters["graph_break"].values()))
print("equal")
