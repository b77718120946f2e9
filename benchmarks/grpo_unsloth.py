"""Run examples/grpo_trl.py with Unsloth's loader, adapters and trainer, for benchmarks.rollouts.

The arguments are the example's.
"""

import unsloth  # isort: skip (before transformers, peft and trl)

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
import trl
from unsloth.models import _decode_graphs

from benchmarks.models import LINEARS

EXAMPLES = Path(__file__).parents[1] / "examples"
Trainer = trl.GRPOTrainer  # Unsloth's


def from_pretrained(path: str, dtype: Any, **_: Any) -> Any:
    model, _tokenizer = unsloth.FastLanguageModel.from_pretrained(
        path, max_seq_length=512, dtype=dtype, load_in_4bit=True, fast_inference=False, local_files_only=True
    )
    return unsloth.FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, target_modules=list(LINEARS), use_gradient_checkpointing="unsloth", random_state=0
    )


def trainer(peft_config: Any, **options: Any) -> Any:
    return Trainer(**options)


transformers.AutoModelForCausalLM = SimpleNamespace(from_pretrained=from_pretrained)
trl.GRPOTrainer = trainer  # type: ignore[assignment, misc]
sys.path.insert(0, str(EXAMPLES))
found = runpy.run_path(str(EXAMPLES / "grpo_trl.py"), run_name="__main__")

file = Path(found["args"].json)
record = json.loads(file.read_text())
record["rollouts"]["replays"] = sum(state.replays for state in _decode_graphs._states(found["trainer"].model))
file.write_text(json.dumps(record))
