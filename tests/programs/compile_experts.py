"""Seconds to compile a mixture and run two steps, and where they go: compile_experts.py packed|stock|dense|lora TOKENS.

*packed*: the patch is on; *stock*: off, the same model; *dense*: off, experts in 16 bits; *lora*: on, LoRA on packed experts.
Up to 512 rows (TOKENS * 4) Inductor sorts in a Triton kernel of its own.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tiny_experts import DEVICE, ids_of, model_of, random_model, with_lora

import nf4_patch

kind, tokens = sys.argv[1], int(sys.argv[2])
torch._inductor.config.force_disable_caches = True
nf4_patch.enable(experts="4bit")
model = random_model("qwen3", device=DEVICE).train() if kind == "dense" else model_of("qwen3", lora=kind != "lora")
if kind == "lora":
    model = with_lora(model)
if kind in ("stock", "dense"):
    nf4_patch.disable()
compiled, seconds = torch.compile(model), []
for _ in range(2):
    started = time.perf_counter()
    compiled(input_ids=ids_of(tokens), labels=ids_of(tokens)).loss.backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds.append(round(time.perf_counter() - started, 1))
print(torch._dynamo.utils.compile_times())
print(kind, tokens, "seconds of two steps", seconds, "graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
