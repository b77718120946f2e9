"""Tiny mixtures of transformers and their checkpoints, a training step, the stacks that it decodes, and counts of the
replacements.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("transformers.integrations.moe", reason="transformers before 5")
pytest.importorskip("bitsandbytes.nn.parametrize", reason="bitsandbytes before 0.46")

import bitsandbytes.functional
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch
from nf4_patch.moe.read import PackedExperts
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
STACKS = ("gate_up_proj", "down_proj")
LAYERS = 2
COMMON = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
ROUTED = {
    "moe_intermediate_size": 256, "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
NEXT = {
    "shared_expert_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GEMMA = {
    "enable_moe_block": True, "top_k_experts": 2, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention"] * LAYERS,
}  # fmt: skip
# A block of the second level has 64 * 256 elements: gpt-oss's down_proj, 128 x 64 an expert, does not divide into such.
ARCHITECTURES = {
    "qwen3": ("Qwen3Moe", {"moe_intermediate_size": 256, "num_experts": 6}),
    "gpt-oss": ("GptOss", {"num_local_experts": 6}),
    "glm4": ("Glm4Moe", ROUTED),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "qwen3-next": ("Qwen3Next", NEXT | {"moe_intermediate_size": 256, "num_experts": 6}),
    "deepseek-v3": ("DeepseekV3", ROUTED | MLA | {"num_key_value_heads": 4}),
    "gemma4": ("Gemma4Text", GEMMA | {"moe_intermediate_size": 256, "num_experts": 6}),
}
CONFIGS = ("qwen3", "gpt-oss")  # where two are enough
# Linear layers of 1 and of 4 outputs, for which bitsandbytes has no product on the CPU.
SKIPPED = ["lm_head", "shared_expert_gate", "router.proj"]
CHECKPOINTING = {"kept": None, "reentrant": {"use_reentrant": True}, "recomputed": {"use_reentrant": False}}


def architectures(*quick):
    """Return these names and those of CONFIGS.

    The full run also has all other names, and test_every_mixture.py has every mixture.
    """
    return [
        name if name in (*CONFIGS, *quick) else pytest.param(name, marks=pytest.mark.full) for name in ARCHITECTURES
    ]


def experts_of(model):
    return [
        module for module in model.modules() if type(module).__name__.endswith("Experts") or is_parametrized(module)
    ]


def is_parametrized(module):
    return hasattr(module, "parametrizations")


def chains_of(model):
    return [
        chain for module in experts_of(model) if is_parametrized(module) for chain in module.parametrizations.values()
    ]


def bytes_of(model):
    """Copy the packed bytes and the state of every stack."""
    return [
        tensor.clone()
        for chain in chains_of(model)
        for tensor in (chain.original.data, *chain[0].quant_state.as_dict(packed=True).values())
    ]


def config_of(name: str, **changes):
    kind, values = ARCHITECTURES[name]
    return getattr(transformers, f"{kind}Config")(**COMMON | values | changes)


def random_model(name: str, dtype=torch.bfloat16, device="cpu", **changes):
    torch.manual_seed(0)
    config = config_of(name, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def is_stack(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 3 and name.rpartition(".")[2] in ("gate_up_proj", "up_proj", "down_proj")


def saved(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Save a model as transformers does, and return its stacks of experts by name."""
    model.save_pretrained(folder, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if is_stack(name, parameter)}


def saved_in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Save a gpt-oss whose experts are in MXFP4, and return its stacks as transformers decodes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    saved(random_model("gpt-oss"), folder)
    weights, stacks = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if name.rpartition(".")[2] in STACKS]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, blocks.shape[:-1], dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stacks[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return stacks


def loaded(folder: Path, **options: Any) -> Any:
    options.setdefault("dtype", torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def in_4bit(quant_type: str = "nf4", nested: bool = True, **options: Any) -> BitsAndBytesConfig:
    options.setdefault("llm_int8_skip_modules", SKIPPED)
    options.setdefault("bnb_4bit_compute_dtype", torch.bfloat16)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested, **options
    )


def model_of(name: str, dtype=torch.bfloat16, nested: bool = True, lora: bool = True, stacks=STACKS, **changes):
    model = random_model(name, dtype, DEVICE, **changes)
    for module in list(model.modules()):
        for stack in stacks:
            if stack in module._parameters:
                replace_parameter_4bit(module, stack, compress_statistics=nested)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.to(DEVICE).train()


def dense_of(model, dtype=None):
    """Return the same model with dense experts, which have the decoded values of the packed ones, in this dtype."""
    config, own = copy.deepcopy(model.config), model.lm_head.weight.dtype
    dense = AutoModelForCausalLM.from_config(config, dtype=own, attn_implementation="eager")
    dense.load_state_dict(
        {name: p for name, p in model.named_parameters() if "parametrizations" not in name}, strict=False
    )
    for module, packed in zip(experts_of(dense), experts_of(model), strict=True):
        for name in STACKS:
            getattr(module, name).data.copy_(getattr(packed, name))
    return dense.to(DEVICE, dtype or own).train()


def with_lora(model, name="default", seed=1, std=0.05, **changes):
    """Add LoRA to the attention and, by the names that users write, to the experts. The numbers are the same for every model."""
    parameters = [f"experts.{stack}" for stack in STACKS]
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": parameters} | changes
    model = get_peft_model(model, LoraConfig(**options), adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    for value in adapters_of(model).values():
        value.data = torch.empty(value.shape).normal_(0, std, generator=generator).to(value)
    return model


def adapters_of(model) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def ids_of(tokens: int = 24) -> torch.Tensor:
    return torch.arange(2 * tokens, device=DEVICE).view(2, tokens) * 7 % 96


def step(model, tokens: int = 24) -> dict[str, torch.Tensor]:
    """Return the loss and every gradient of a training step."""
    model.zero_grad()
    loss = model(input_ids=ids_of(tokens), labels=ids_of(tokens)).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == stock.keys() and all(torch.equal(ours[name], stock[name]) for name in stock)


@contextlib.contextmanager
def decoded(monkeypatch):
    """Return a list that gets the storage of every stack that bitsandbytes' parametrization or a PackedExperts decodes."""
    storages: list[StorageWeakRef] = []

    def recorded(decode):
        def record(*args):
            result = decode(*args)
            storages.append(StorageWeakRef(result.untyped_storage()))
            return result

        return record

    with monkeypatch.context() as patch:
        for owner, name in ((bitsandbytes.functional, "dequantize_4bit"), (PackedExperts, "dense")):
            patch.setattr(owner, name, recorded(getattr(owner, name)))
        yield storages


def reasons(implementation: str = "grouped_mm") -> Counter[Reason]:
    return Counter(
        {reason: n for (target, reason), n in counters.fallbacks.items() if target.endswith(f".{implementation}")}
    )


def hits(implementation: str = "grouped_mm") -> int:
    (target,) = {name for name, *_ in counters.hit_counters if name.endswith(f".{implementation}")} or {""}
    return counters.hits(target)


class Layer:
    """The experts of one layer of Qwen3 MoE. Its methods return output and input gradient for eight tokens."""

    def __init__(self) -> None:
        self.experts = experts_of(model_of("qwen3", lora=False))[0]
        self.hidden = torch.linspace(-1, 1, 8 * 64, device=DEVICE).view(8, 64).bfloat16().requires_grad_()
        self.ids = torch.arange(16, device=DEVICE).view(8, 2) % 6
        self.weights = torch.full((8, 2), 0.5, dtype=torch.bfloat16, device=DEVICE)

    def chain(self, name: str = STACKS[0]):
        return self.experts.parametrizations[name]

    def forward(self) -> torch.Tensor:
        return self.experts(self.hidden, self.ids, self.weights)

    def gradient(self, output: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(output.float().square().sum(), self.hidden)[0]

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.forward()
        return output.detach(), self.gradient(output)

    def stock(self, function=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step, or another method, without the patch, and return its result."""
        nf4_patch.disable()
        result = (function or self.step)()
        nf4_patch.enable(experts="4bit")
        return result
