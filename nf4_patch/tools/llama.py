"""Llamas by their sizes, and with random weights in 4 bits: what is measured and trained here without a download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # `nf4-patch --help` lists MODELS without torch
    from pathlib import Path

    import torch

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Shape(NamedTuple):
    """Of a Llama, in the names of transformers' LlamaConfig."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 512
    max_position_embeddings: int = 2048


# Llama 3.2 1B, Llama 3.1 8B and 70B, Qwen 2.5 7B:
# hidden size, intermediate size, layers, heads, key/value heads, vocabulary, positions
MODELS = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128256, 8192),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192),
    "qwen-7b": Shape(3584, 18944, 28, 28, 4, 152064, 8192),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128256, 8192),
}
LLAMA_8B = MODELS["llama-8b"]


def projections(model: Shape) -> list[tuple[int, int]]:
    """[out, in] of a decoder layer's linear layers, each shape once: k and v, q and o, gate and up, down."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    heads = hidden // model.num_attention_heads * model.num_key_value_heads
    return [(heads, hidden), (hidden, hidden), (intermediate, hidden), (hidden, intermediate)]


def config_of(shape: Shape, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A LlamaConfig, in :func:`training_dtype` unless another dtype is given."""
    from transformers import LlamaConfig

    name = str(dtype or training_dtype()).removeprefix("torch.")
    options |= {"tie_word_embeddings": False, "dtype": name, "pad_token_id": 0}
    return LlamaConfig(**shape._asdict(), **options)


def training_dtype() -> torch.dtype:
    """bf16; fp16 on a GPU without bf16 arithmetic, where PyTorch emulates it (before sm_80: a T4)."""
    import torch

    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if old else torch.bfloat16


def build_4bit(config: Any, device: Any = "cuda") -> Any:
    """A causal model of that configuration with random weights: its linear layers but the head as bitsandbytes'
    Linear4bit, experts by bitsandbytes' own helper, both NF4 with double quantization."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear and name != "lm_head":
                sizes = child.in_features, child.out_features, child.bias is not None
                packed = Linear4bit(*sizes, compute_dtype=config.dtype, device="meta", **options)
                packed.weight = Params4bit(child.weight.data, requires_grad=False, module=packed, **options)
                packed.bias = child.bias
                setattr(module, name, packed.to(device))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 3:  # the weights of all experts
                replace_parameter_4bit(module, name, compress_statistics=True)
    model.is_loaded_in_4bit = True  # peft asks for it
    return model


SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "word": 3}  # the whole vocabulary of the tokenizer


def save_config(folder: str | Path, config: Any, device: str | torch.device) -> None:
    """A causal model with random weights, in the dtype of its configuration, and its tokenizer, as save_pretrained leaves them."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "word"}
    words = Tokenizer(models.WordLevel(SPECIAL, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)
