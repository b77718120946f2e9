"""Run TRL's own sft.py offline, on a model and a data set that this program makes: trl_sft.py FOLDER [--use_liger_kernel ...].

NF4_PATCH and NF4_PATCH_LORA switch the patch on, and the script does not name it. The script then runs again without
the patch. Print the losses and counts of both runs as JSON.
"""

import json
import os
import runpy
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import torch

from benchmarks.checkpoint import SPECIAL, Shape, save

folder, on_gpu = Path(sys.argv[1]), torch.cuda.is_available()
if not (folder / "model").exists():
    save(folder / "model", Shape(512, 1024, 4, 8, 4) if on_gpu else Shape(64, 128, 2, 4, 2))
    (folder / "data").mkdir()
    lines = [json.dumps({"text": " ".join(["word"] * (8 + row % 5))}) for row in range(64)]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))
from transformers import Trainer

import nf4_patch

log = Trainer.log
Trainer.log = lambda self, logs, *rest: (
    losses.extend([logs["loss"]] if "loss" in logs else []),
    log(self, logs, *rest),
)[1]
sys.argv = [
    "sft.py", *(f"--{name}={value}" for name, value in {
        "model_name_or_path": folder / "model", "dataset_name": folder / "data", "output_dir": folder / "out",
        "load_in_4bit": True, "use_bnb_nested_quant": True, "dtype": "bfloat16", "use_peft": True, "lora_r": 8,
        "bf16": True, "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "gradient_checkpointing": True, "use_cpu": not on_gpu,
    }.items()), "--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    *sys.argv[2:],
]  # fmt: skip
for side in ("fused", "stock"):
    losses: list[float] = []
    if side == "stock":
        nf4_patch.disable()
    before = nf4_patch.status().targets
    runpy.run_module("trl.scripts.sft", run_name="__main__")
    hits = [sum(row.hits for row in rows if "Linear4bit" in row.name) for rows in (nf4_patch.status().targets, before)]
    print(json.dumps({"losses": losses, "fused": hits[0] - hits[1]}))
