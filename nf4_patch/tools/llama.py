"""Models with random weights, on disk and in 4 bits: what is trained here without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "word": 3}  # the whole vocabulary of the tokenizer
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int = 512
    positions: int = 2048


def config_of(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.positions, tie_word_embeddings=False,
        pad_token_id=SPECIAL["<pad>"], bos_token_id=SPECIAL["<s>"], eos_token_id=SPECIAL["</s>"],
        dtype=str(dtype).removeprefix("torch."), architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def save(
    folder: str | Path, shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", seed: int = 0
) -> int:  # fmt: skip
    """A Llama with random weights and its tokenizer, as save_pretrained leaves them; the number of its parameters."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config_of(shape, dtype), dtype=dtype)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(SPECIAL, unk_token="word")),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="word",
    ).save_pretrained(folder)  # fmt: skip
    return sum(parameter.numel() for parameter in model.parameters())


def load_4bit(folder: str | Path, dtype: torch.dtype = torch.bfloat16, device: Any = 0, **options: Any) -> Any:
    """The model on disk in NF4 with double quantization, by transformers and bitsandbytes."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=dtype, device_map={"": device}, **options
    )


def training_dtype() -> torch.dtype:
    """bf16; fp16 on a GPU without bf16 arithmetic, where PyTorch emulates it (before sm_80: a T4)."""
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if old else torch.bfloat16


def build_4bit(config: Any, device: Any = "cuda") -> Any:
    """A causal model of that configuration with random weights, never on disk: its linear layers but the head as
    bitsandbytes' Linear4bit, experts by bitsandbytes' own helper, both NF4 with double quantization."""
    import bitsandbytes
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear and name != "lm_head":
                packed = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, child.bias is not None, config.dtype, True, "nf4",
                    device="meta",
                )  # fmt: skip
                packed.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=packed
                )
                packed.bias = child.bias
                setattr(module, name, packed.to(device))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 3:  # the weights of all experts
                replace_parameter_4bit(module, name, compress_statistics=True)
    model.is_loaded_in_4bit = True  # peft asks for it
    return model
