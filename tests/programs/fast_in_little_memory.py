"""Train with ``enable("fast")`` and two lengths, in much memory and in little.

Losses and adapters must be bit-identical to those with ``lora="fused"`` alone. Algorithms are deterministic, because the
backward of attention otherwise adds in any order.
"""

import gc

import torch

import nf4_patch
from benchmarks.models import Shape, config_of
from benchmarks.training import optimizer_of, peft_model, trained
from nf4_patch.memory import spare as memory

MIB, LAYERS = 2**20, 12
LENGTHS = [384, 1024, 384, 384, 1024, 1024, 384, 1024] * 3
ROOM = 4000, 600, 250, 50  # MiB beside the needed memory and the margin
memory.MARGIN, memory.MARGIN_PART = 256 * MIB, 0
torch.use_deterministic_algorithms(True)
model = peft_model(config_of(Shape(1024, 2816, LAYERS, 8, 4, vocab_size=4096)))
batches = [
    torch.randint(3, 4000, (1, length), generator=torch.Generator().manual_seed(step)).cuda()
    for step, length in enumerate(LENGTHS)
]


def train(profile=None, **options):
    """Return the losses, the adapters and the status."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimizer, losses = optimizer_of(model, lr=1e-3), []  # sets the adapters to the same numbers
    with nf4_patch.enabled(profile, **options):
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        status = nf4_patch.status()
    return losses, [parameter.detach().clone() for parameter in trained(model)], status


want = train(lora="fused")
needed, total = torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]
replays, kept, cached = [], [], []
for room in ROOM:
    torch.cuda.set_per_process_memory_fraction((needed + memory.MARGIN + room * MIB) / total)
    losses, adapters, status = train("fast")
    print(f"{room} MiB: {status}", flush=True)
    assert losses == want[0], (room, losses, want[0])
    assert all(map(torch.equal, adapters, want[1])), room
    replays.append(status.graphs.replays)
    kept.append(status.activations.kept)
    cached.append(status.cache.weights)
assert replays[0] and kept[0] == LAYERS and cached[0] == 7 * LAYERS, (kept, cached)
assert kept[-1] < LAYERS and cached[-1] < cached[0], (kept, cached)
print("equal")
