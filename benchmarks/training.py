"""QLoRA training steps for benchmarks: random weights, LoRA with r=16, gradient checkpointing, AdamW.

Adapters are in 16 bits under autocast, as in TRL. The learning rate is 0, so every step does all the work without changing the
loss. Losses can therefore be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import nf4_patch
from benchmarks.models import LINEARS, LLAMA_8B, Shape, build_4bit, training_dtype
from benchmarks.timing import synchronize
from nf4_patch.tools.patch import patch

BUDGET = "64GiB"
LENGTHS = ((1, 512), (2, 1024), (2, 2048))  # (batch, tokens)
RANK = 16
LAYERS = 4  # of an 8B model


def llama(layers: int = LAYERS) -> Shape:
    """Return the shape of Llama-3.1-8B with fewer layers, and a vocabulary that is smaller in the same proportion.

    With all 128,256 words, the head would take a third of a step with four layers.
    """
    return LLAMA_8B._replace(num_hidden_layers=layers, vocab_size=128256 * layers // 32)


LLAMA = llama()


def peft_model(config: Any, targets: Iterable[str] = LINEARS, **options: Any) -> Any:
    """Build a model with random NF4 weights and LoRA on ``targets``, in the config's dtype. ``options`` go to LoraConfig."""
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config, "cuda" if torch.cuda.is_available() else "cpu")
    # prepare_model_for_kbit_training is not used, because its fp32 head would dominate the step.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, lora)
    for parameter in trained(model):  # as TRL's SFTTrainer does for a 4-bit model
        parameter.data = parameter.data.to(config.dtype)
    return model


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: Any, lr: float = 0.0, name: str = "adamw_torch") -> torch.optim.Optimizer:
    """Return an optimizer. Put the model in training mode and set its adapters to fixed random numbers.

    The numbers are the same in every dtype, up to rounding.

    Args:
        name: adamw_torch, adamw_torch_fused or paged_adamw_8bit, as ``optim`` of transformers' TrainingArguments.
    """
    model.train()
    parameters = trained(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:  # peft initializes B to zero, so adapters would not affect the loss
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    if name == "paged_adamw_8bit":
        from bitsandbytes.optim import PagedAdamW8bit

        paged: torch.optim.Optimizer = PagedAdamW8bit(parameters, lr=lr, weight_decay=0.0)
        return paged
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=name == "adamw_torch_fused")


Size = tuple[int, int]  # batch, tokens


class Step:
    """A training step on fixed tokens, with the patch on (and these options) or off.

    It records losses and the peaks of allocated and reserved GPU memory, in bytes.
    """

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, size: Size, on: bool, cache: str | int = "off",
        autocast: bool = True, **options: str,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(size[0] * size[1])
        vocabulary = min(LLAMA.vocab_size, model.config.vocab_size)
        self.tokens = torch.randint(3, vocabulary, size, generator=generator).to(model.device)
        self.model, self.optimizer, self.on, self.cache = model, optimizer, on, cache
        self.autocast, self.options = autocast, options
        self.losses: list[float] = []
        self.peak = self.reserved = self.taken = self.calls = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Turn the patch on or off and run two warm-up steps, then run the ``with`` block."""
        with patch(self.on, cache=self.cache, **self.options):
            # The first step fills the cache and compiles. A layer is captured as CUDA graphs at its third call.
            for _ in range(4 if "graphs" in self.options else 2):
                self()
            yield

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.tokens.device.type, training_dtype(), enabled=self.autocast):
            loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def observe(self) -> None:
        """Run a step that is not timed, and record its loss, peak memory, kernel calls and the cache's size."""
        with self.patched():
            self()  # compiles, allocates
            synchronize()
            gc.collect()  # frees the previous model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            calls = nf4_patch.status().hits
            self.losses.append(self().item())
            self.calls = nf4_patch.status().hits - calls
            if torch.cuda.is_available():
                self.peak, self.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.taken = sum(nf4_patch.status().cache.taken.values())
