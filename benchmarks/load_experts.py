"""python -m benchmarks.load_experts [LAYERS] [FOLDER]: a checkpoint in Qwen3-30B-A3B's shapes loads, experts packed and not.

Random weights in bf16, a shard a layer, just written (in the page cache). Each load is a process that prints a line of JSON;
the packed one may take 2.5 GiB of the GPU beside the packed model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch
from benchmarks.experts import qwen3

GIB = 2**30


def empty_model(layers: int) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(qwen3(layers), dtype=torch.bfloat16)


def write(folder: Path, layers: int) -> None:
    model, places = empty_model(layers), dict[str, str]()
    model.config.save_pretrained(folder)
    names = dict(model.named_parameters())
    for prefix in (*(f"model.layers.{i}." for i in range(layers)), ""):
        weights: dict[str, torch.Tensor] = {}
        for name in [name for name in names if name.startswith(prefix)]:
            value = torch.empty_like(names.pop(name), device="cuda").normal_(std=0.02).cpu()
            path, _, stack = name.rpartition(".")
            kinds = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack,)
            for kind, part in zip(kinds, value.chunk(len(kinds), dim=1) if value.dim() == 3 else (), strict=False):
                weights |= {f"{path}.{i}.{kind}.weight": expert.contiguous() for i, expert in enumerate(part)}
            weights |= {name: value} if value.dim() < 3 else {}
        save_file(weights, folder / f"{prefix}safetensors", {"format": "pt"})
        places |= dict.fromkeys(weights, f"{prefix}safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def packed_size(layers: int) -> float:
    """Bytes: 1/2 a weight, a scale of 1 byte for 64, one of 4 for 64 * 256; 2 a weight that stays in bf16."""
    sizes = {name: p.numel() for name, p in empty_model(layers).named_parameters()}
    dense = sum(size for name, size in sizes.items() if any(part in name for part in ("embed", "head", "norm")))
    return (sum(sizes.values()) - dense) * (1 / 2 + 1 / 64 + 4 / 64 / 256) + 2 * dense


def load(folder: str, kind: str, layers: int) -> dict[str, Any]:
    seen: dict[str, list[float]] = {"RssAnon": [], "VmRSS": []}  # what it has allocated; with the files it has mapped

    def watch_the_host() -> None:
        while True:
            lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
            for name, sizes in seen.items():
                sizes.append(int(lines[name].split()[0]) / 2**20)
            time.sleep(0.005)

    threading.Thread(target=watch_the_host, daemon=True).start()
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    options: dict[str, Any] = {} if kind == "16 bits" else {"quantization_config": config}
    if kind == "packed experts":
        nf4_patch.enable(experts="4bit")
        torch.cuda.set_per_process_memory_fraction((packed_size(layers) + 2.5 * GIB) / torch.cuda.mem_get_info()[1])
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": 0}, **options)
    model.lm_head.weight[0, 0].item()  # waits for the GPU
    result: dict[str, Any] = {"load": kind, "layers": layers, "seconds": time.perf_counter() - begin}
    result |= {f"host peak, {name}, GiB": max(sizes) - sizes[0] for name, sizes in seen.items()}
    gpu = (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    return result | {f"GPU, {size.__name__}, GiB": size() / GIB for size in gpu}


if __name__ == "__main__":
    count, place, which = (*sys.argv[1:], *("16", "", "")[len(sys.argv) - 1 :])
    if which:
        print(json.dumps(load(place, which, int(count))))
    else:
        with tempfile.TemporaryDirectory(dir=place or None) as place:
            write(Path(place), int(count))
            for which in ("packed experts", "load_in_4bit", "16 bits"):
                subprocess.run([sys.executable, "-m", "benchmarks.load_experts", count, place, which], check=True)
