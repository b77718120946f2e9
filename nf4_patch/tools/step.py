"""Run and time a QLoRA training step on random 4-bit weights, for ``nf4-patch doctor --measure`` and benchmarks.

Adapters are in 16 bits under autocast, as in TRL.
"""

from __future__ import annotations

import copy
import platform
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..libraries.transformers.loading import is_stack
from ..version import release_of

RANK = 16  # the rank of LoRA
VOCABULARY = 16_032  # tokens of a step are below this number, the vocabulary of Llama-3.1-8B with 4 of 32 layers
ROUNDING = 2**-7  # the relative rounding error of losses in bf16
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def training_dtype() -> torch.dtype:
    """Return bf16, or fp16 before sm_80 (such as a T4), where PyTorch emulates bf16."""
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if old else torch.bfloat16


def build_4bit(config: Any, device: Any = "cuda") -> Any:
    """Build a causal model with random weights in NF4 with double quantization.

    All linear layers except the head are packed, and all experts.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit
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
        for name, _ in list(module.named_parameters(recurse=False)):
            if is_stack(module, name):
                from bitsandbytes.nn.parametrize import replace_parameter_4bit

                replace_parameter_4bit(module, name, compress_statistics=True)
    model.is_loaded_in_4bit = True  # peft checks this
    return model


def shortened(whole: Any, layers: int) -> Any:
    """Return a configuration with fewer layers and a proportionally smaller vocabulary."""
    config = copy.deepcopy(whole)
    config.num_hidden_layers, config.vocab_size = layers, max(8, whole.vocab_size * layers // whole.num_hidden_layers)
    if len(getattr(config, "layer_types", None) or ()) > layers:  # some configurations compute it and refuse to set it
        config.layer_types = config.layer_types[:layers]
    config.dtype = training_dtype()
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0  # it must be in the vocabulary, and some configurations refuse None
    return config


def peft_model(config: Any, targets: str | Iterable[str] = "all-linear", **options: Any) -> Any:
    """Build a model with random NF4 weights and LoRA on ``targets``. ``options`` go to LoraConfig."""
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config, "cuda" if torch.cuda.is_available() else "cpu")
    # prepare_model_for_kbit_training is not used, because its fp32 head would dominate the step.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    modules = targets if isinstance(targets, str) else list(targets)
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=modules, task_type="CAUSAL_LM", **options)
    )
    for parameter in trained(model):  # as TRL's SFTTrainer does for a 4-bit model
        parameter.data = parameter.data.to(config.dtype)
    return model


def with_liger(model: Any) -> str:
    """Apply Liger's kernels if possible. Say whether they are used."""
    if not release_of("liger_kernel") or not torch.cuda.is_available():
        return "without Liger"
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    _apply_liger_kernel_to_instance(model=model.get_base_model())
    return "Liger on all sides" if model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN else "without Liger"


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def reset(model: Any) -> list[torch.nn.Parameter]:
    """Put the model in training mode, set its adapters to fixed random numbers, and return them.

    Up to rounding, the numbers are the same in every dtype.
    """
    model.train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model):  # with B = 0, as peft initializes it, adapters would not affect the loss
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return trained(model)


class Step:
    """A training step, always on the same tokens [batch, length]. ``size`` is (batch, length)."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, size: tuple[int, int]):
        generator = torch.Generator().manual_seed(size[0] * size[1])
        self.tokens = torch.randint(3, min(VOCABULARY, model.config.vocab_size), size, generator=generator).to(
            model.device
        )
        self.model, self.optimizer = model, optimizer

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.tokens.device.type, training_dtype()):
            loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_times(step: Callable[[], Any], rounds: int = 3, steps: int = 3) -> list[float]:
    """Return the wall-clock time per step in ms for each round, which synchronizes once, after ``steps`` steps."""
    found = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        found.append((time.perf_counter() - begin) / steps * 1e3)
    return found


def kernels(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return the name of each kernel and copy that a call launches, and its GPU time in ms."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # profiler.events() would take 0.3 s per step to build a tree
    on_gpu = (e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation())
    return [(event.name(), event.duration_ns() / 1e6) for event in on_gpu]


def processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
