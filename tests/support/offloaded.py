"""Tiny models whose packed weights wait in host memory: loaded, trained and read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import bitsandbytes
import tiny_experts
import torch
import transformers
from tiny_experts import STACKS, adapters_of, experts_of, ids_of, in_4bit, loaded, with_lora

import nf4_patch
from nf4_patch.libraries.bitsandbytes.stacks import stacks_of
from nf4_patch.offload import host_memory, planning
from nf4_patch.patching.dequantizer import Dequantizer


def model_of(folder: Any, where: str | int = "all", nested: bool = True, **options: Any) -> Any:
    """Load a checkpoint in 16 bits, packed."""
    nf4_patch.enable(experts="4bit", offload=where)
    return read_again(folder, quantization_config=in_4bit(nested=nested), **options)


def read_again(folder: Any, **options: Any) -> Any:
    """Load a checkpoint as it was saved."""
    if tiny_experts.DEVICE.type == "cuda":
        options.setdefault("device_map", {"": tiny_experts.DEVICE})
    # eager: the backward of cuDNN's attention may not repeat itself
    return loaded(folder, attn_implementation="eager", **options)


def in_host(model: Any) -> dict[tuple[int, str], Any]:
    """Return the block in host memory of each stack, or None, by layer and name."""
    return {
        (layer, name): host_memory.blocks.get(module.parametrizations[name].original.data_ptr(), host_memory.no_block)()
        for layer, module in enumerate(experts_of(model))
        for name in STACKS
    }


def packed_of(model: Any) -> dict[str, tuple[Any, Any]]:
    """Return the packed weights in layers as (bytes, QuantState), by full name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            found[f"{name}.weight"] = module.weight, module.weight.quant_state
        if isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
            found[f"{name}.original"] = module.original, module[0].quant_state
    return {name: each for name, each in found.items() if planning.layer_of(name)}


def all_in_host(model: Any) -> bool:
    """Return whether every packed weight and its absmax are in host memory."""
    return all(
        tensor.data_ptr() in host_memory.blocks for each in packed_of(model).values() for tensor in tensors_of(*each)
    )


def none_in_host(model: Any) -> bool:
    return not any(
        tensor.data_ptr() in host_memory.blocks for each in packed_of(model).values() for tensor in tensors_of(*each)
    )


def sizes_of(model: Any) -> list[int]:
    """Return the packed bytes of each layer."""
    sizes: Counter[str] = Counter()
    for name, each in packed_of(model).items():
        sizes[planning.layer_of(name)] += sum(tensor.nbytes for tensor in tensors_of(*each))
    return list(sizes.values())


def tensors_of(packed: Any, state: Any) -> tuple[torch.Tensor, ...]:
    return packed, state.absmax, *([state.state2.absmax] if state.nested else [])


def train(
    model: Any, steps: int = 3, checkpointing: Any = None, tokens: int = 24, ids: Any = None, parallel: Any = None
) -> tuple[torch.Tensor, list[Any]]:
    """Train, and return the losses and the adapters. ``parallel`` makes the model that is called from ``model``."""
    model.train()
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(checkpointing)
    optimizer = torch.optim.AdamW(adapters_of(model).values(), lr=1e-2)
    losses, ids = [], ids_of(tokens) if ids is None else ids
    called = model if parallel is None else parallel(model)
    for _ in range(steps):
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), [value.detach() for value in adapters_of(model).values()]


class Training:
    """Runs steps of one optimizer, and collects the losses."""

    def __init__(self, model: Any):
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(adapters_of(model).values(), lr=1e-2)
        self.losses: list[torch.Tensor] = []

    def steps(self, count: int = 1, tokens: int = 24) -> None:
        for _ in range(count):
            ids = ids_of(tokens)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())


def same_steps(ours: Any, others: Any) -> bool:
    return torch.equal(ours[0], others[0]) and all(map(torch.equal, ours[1], others[1]))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.train()(input_ids=ids_of()).logits
        return found


def dense(module: Any, name: str = STACKS[0], only_read: bool = False) -> torch.Tensor:
    return stacks_of(module, Dequantizer("test"), only_read)[name].dense()


def counts() -> Any:
    """Return the counts of the only GPU."""
    (found,) = nf4_patch.status().offload.values()
    return found


def check_merging(resident: Any, model: Any, logits: Any) -> None:
    """Check that reads see adapters merged into stacks in host memory, and see them unmerged, even after earlier prefetches."""
    before = logits(resident)
    assert torch.equal(logits(model), before)
    for each in (resident, model):
        each.merge_adapter()
    merged = logits(resident)
    assert torch.equal(logits(model), merged) and not torch.equal(merged, before)
    for each in (resident, model):
        each.unmerge_adapter()
    assert torch.equal(logits(model), logits(resident))
    assert all(in_host(model).values())


# --- dense models ---


def dense_model(layers: int, device: str = "cpu", **changes: Any) -> Any:
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def load_dense(folder: Any, **options: Any) -> Any:
    places = {key: options.pop(key) for key in ("device_map",) if key in options}
    if tiny_experts.DEVICE.type == "cuda":
        places.setdefault("device_map", {"": tiny_experts.DEVICE})
    config = in_4bit(**options)
    return loaded(folder, attn_implementation="eager", quantization_config=config, **places)


def with_lora_on_all(model: Any, **changes: Any) -> Any:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return with_lora(model, target_modules=names, target_parameters=None, **changes)
