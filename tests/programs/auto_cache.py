"""Train near the limit of the memory: ``auto_cache.py FIRST LAST [OPTION ...]``.

A schedule that fits without the option also fits with it. The options are "cache" (by default) and "activations".

A schedule is a sequence of batches of random size and length, with evaluations in between. A random limit caps the GPU
memory that PyTorch may take.
"""

import gc
import random
import sys

import torch

import nf4_patch
from nf4_patch.cache.store import cache
from benchmarks import models
from benchmarks.training import peft_model

MIB = 2**20
OPTIONS = sys.argv[3:] or ["cache"]
SHAPE = models.Shape(2048, 5632, 8, 16, 4, vocab_size=32000)
model = peft_model(models.config_of(SHAPE))
total = torch.cuda.mem_get_info()[1]


def clean():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def run(schedule):
    """Return whether the memory was enough, and the bytes that the cache and the layers of the last batch held at the end."""
    torch.manual_seed(0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in parameters:
            p.normal_(std=0.01)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    try:
        for batch, length, trains in schedule:
            tokens = torch.randint(3, SHAPE.vocab_size, (batch, length), generator=generator).cuda()
            model.train(trains)
            with torch.set_grad_enabled(trains):
                loss = model(input_ids=tokens, labels=tokens).loss
            if trains:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert loss.isfinite()
    except torch.OutOfMemoryError:
        return False, 0
    return True, sum(cache.taken.values()) + nf4_patch.status().activations.size


taken = []
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    choose = random.Random(seed)
    schedule = [
        (choose.choice((1, 1, 2, 4, 6)), choose.choice((128, 256, 512, 1024, 1536)), choose.random() < 0.8)
        for _ in range(12)
    ]
    schedule += [(*schedule[0][:2], True)] * 4
    nf4_patch.enable(**dict.fromkeys(OPTIONS, "off"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    clean()
    assert run(schedule)[0]
    needed = torch.cuda.max_memory_reserved()
    limit = needed + choose.choice((50, 200, 500, 1000, 1500, 2500, 4000)) * MIB
    clean()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    nf4_patch.enable(**dict.fromkeys(OPTIONS, "auto"))
    enough, held = run(schedule)
    state = getattr(nf4_patch.status(), OPTIONS[0])
    nf4_patch.enable(**dict.fromkeys(OPTIONS, "off"))
    clean()
    print(
        seed,
        f"{limit / MIB:.0f} MiB, {(limit - needed) / MIB:.0f} to spare, {held / MIB:.0f} held:",
        state.waits or state.budget,
    )
    assert enough or not run(schedule)[0], seed  # the limit is below what the patch alone takes
    taken.append(held)
assert max(taken) > (500 if "cache" in OPTIONS else 100) * MIB, taken
print("auto")
