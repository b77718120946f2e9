"""A QLoRA training step to measure: random weights, LoRA r=16, gradient checkpointing, AdamW; adapters in 16 bits under
autocast, as TRL trains. The learning rate is 0: every step does the whole work and leaves the loss as it was, to compare by bits.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import nf4_patch
from benchmarks.models import LINEARS, LLAMA_8B, build_4bit, training_dtype
from benchmarks.timing import synchronize
from nf4_patch.tools.patch import patch

BUDGET = "64GiB"
LENGTHS = ((1, 512), (2, 1024), (2, 2048))  # (batch, tokens)
RANK = 16
LAYERS = 4  # of an 8B model
# A head of the whole model's 128,256 words would be a third of the step; so it is to four layers what it is to 32.
LLAMA = LLAMA_8B._replace(num_hidden_layers=LAYERS, vocab_size=128256 * LAYERS // 32)


def peft_model(config: Any, targets: Iterable[str] = LINEARS, **options: Any) -> Any:
    """Random weights in NF4 and LoRA on ``targets``, with further options of LoRA; all in the dtype of the configuration."""
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config, "cuda" if torch.cuda.is_available() else "cpu")
    # Not prepare_model_for_kbit_training: its fp32 head hides the layers behind a matmul of no 4-bit weight.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, lora)
    for parameter in trained(model):  # TRL's SFTTrainer has the adapters of a 4-bit model so
        parameter.data = parameter.data.to(config.dtype)
    return model


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: Any, lr: float = 0.0) -> torch.optim.Optimizer:
    """For the model in training mode, its adapters random: the same numbers in every dtype, rounded."""
    model.train()
    parameters = trained(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:  # peft starts B at zero, which would hide the adapters from the loss
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


Size = tuple[int, int]  # batch, tokens


class Step:
    """One training step on fixed tokens, the patch on, with these options, or off; remembers losses and peak memory."""

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
        self.peak = self.taken = self.calls = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The patch on or off, after two steps."""
        with patch(self.on, cache=self.cache, **self.options):
            # fills the cache, and lets compiled layers find their graph; the second is as every further one
            for _ in range(4 if "graphs" in self.options else 2):  # a layer is captured at its third call
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
        """A step outside the timing: its loss, peak memory and kernel calls, and what the cache holds then."""
        with self.patched():
            self()  # compiles, allocates
            synchronize()
            gc.collect()  # of the model before this one
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            calls = nf4_patch.status().hits
            self.losses.append(self().item())
            self.calls = nf4_patch.status().hits - calls
            self.peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            self.taken = sum(nf4_patch.status().cache.taken.values())
