"""Save a random model to disk, for Unsloth's steps and for tests that load a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Shape, config_of

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "word": 3}  # the whole vocabulary of the tokenizer


def save_config(folder: str | Path, config: Any, device: str | torch.device) -> None:
    """Save a causal model with random weights, in its config's dtype, and a tokenizer, with save_pretrained."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "word"}
    words = Tokenizer(models.WordLevel(SPECIAL, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)


def save(
    folder: str | Path, shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> None:
    """Save a Llama with random weights and a tokenizer, with save_pretrained."""
    special = {"bos_token_id": SPECIAL["<s>"], "eos_token_id": SPECIAL["</s>"]}
    save_config(folder, config_of(shape, dtype, **special), device)


def load_4bit(folder: str | Path, device: Any = 0) -> Any:
    """Load a model from disk in NF4 with double quantization, with transformers and bitsandbytes, computing in bf16."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **options)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
    )
