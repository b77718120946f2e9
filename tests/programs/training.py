"""Train one Linear4bit on the CPU: ``training.py [STEPS]``. Print how often the kernel ran."""

from __future__ import annotations

import sys

import bitsandbytes as bnb
import torch


def train(steps: int = 1) -> int:
    layer = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16).to(torch.bfloat16).to("cpu")
    for _ in range(steps):
        layer(torch.randn(5, 128, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return sys.modules["nf4_patch"].status().hits  # bitsandbytes has imported it: an entry point


if __name__ == "__main__":
    hits = train(*map(int, sys.argv[1:]))
    print(f"hits: {hits}\n", end="", flush=True)  # one write: another process may print at the same time
