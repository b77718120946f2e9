"""Make a random model, a tokenizer and a text, so that the examples run without a network.

``checkpoint("random")`` saves a small Llama in a temporary folder, as an ordinary checkpoint.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import is_liger_kernel_available

RANDOM = {
    "random": "llama", "random-llama": "llama", "random-qwen": "qwen3", "random-gemma": "gemma3_text",
    "random-qwen-moe": "qwen3_moe", "random-gpt-oss": "gpt_oss",
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
SIZES = {
    # A few hundred thousand weights, which train in seconds on a CPU.
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32,
    },
    # The shapes of the first four layers of Llama-3.1-8B, 0.9 billion weights.
    "8b-4layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
SPECIAL = ("<s>", "</s>", "<pad>")
_folders: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


def text() -> list[str]:
    """Return the lines of text.txt."""
    return Path(__file__).with_name("text.txt").read_text().splitlines()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, plus the tokens of SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids, which Llama does not accept
    )  # fmt: skip


def checkpoint(model: str, size: str = "tiny", folder: str | None = None) -> str:
    """Return ``model``. If it is a key of RANDOM, make such a model in ``folder``, by default a temporary one, and return the folder."""
    if model not in RANDOM:
        return model
    if folder is None:
        _folders.append(tempfile.TemporaryDirectory(prefix="nf4-patch-example-"))
        folder = _folders[-1].name
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        RANDOM[model],
        vocab_size=512, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16",
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **SIZES[size], **EXPERTS.get(RANDOM[model], {}),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(path: str, **options: str):
    """Return the tokenizer of a checkpoint.

    Raises:
        ValueError: the checkpoint has no tokenizer. For some models, transformers makes one without tokens instead.
    """
    cause = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        if tokenizer("a", add_special_tokens=False).input_ids:
            return tokenizer
    except ValueError as error:
        cause = error
    raise ValueError(
        f"{path} has no tokenizer. Save that of the original model there: "
        f'AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained("{path}")'
    ) from cause


def compute_dtype() -> torch.dtype:
    """Return float16 on GPUs that emulate bfloat16, such as a T4, and bfloat16 everywhere else."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def require_triton(parser: argparse.ArgumentParser) -> None:
    """End with an error if Triton's kernels cannot run. TRL computes its loss in such a kernel."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("TRL computes its loss in a Triton kernel, which needs an NVIDIA GPU or TRITON_INTERPRET=1 (slow)")


def require_liger(parser: argparse.ArgumentParser) -> None:
    """End with an error if Liger is not installed, or if its Triton kernels cannot run."""
    if not is_liger_kernel_available():
        parser.error("this option needs Liger: pip install liger-kernel")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("this option runs Liger's Triton kernels, which need an NVIDIA GPU or TRITON_INTERPRET=1 (slow)")


def batches(tokenizer, rows: int, tokens: int, steps: int, device: torch.device | str):
    """Yield ``steps`` batches, int64 [rows, tokens], cut from the text. The text is repeated if it is too short."""
    ids = torch.tensor(tokenizer("\n".join(text())).input_ids)
    for step in range(steps):
        start = step * rows * tokens
        where = torch.arange(start, start + rows * tokens) % len(ids)
        yield ids[where].view(rows, tokens).to(device)
