"""QLoRA training steps for benchmarks: random weights, LoRA with r=16, gradient checkpointing, AdamW.

Adapters are in 16 bits under autocast, as in TRL. The learning rate is 0, so every step does all the work without changing the
loss. Losses can therefore be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

import nf4_patch
from benchmarks.models import LLAMA_8B, Shape
from benchmarks.timing import synchronize
from nf4_patch.tools import step
from nf4_patch.tools.patch import patch
from nf4_patch.tools.step import RANK as RANK
from nf4_patch.tools.step import peft_model as peft_model
from nf4_patch.tools.step import reset
from nf4_patch.tools.step import trained as trained

BUDGET = "64GiB"
LENGTHS = ((1, 512), (2, 1024), (2, 2048))  # (batch, tokens)
LAYERS = 4  # of an 8B model


def llama(layers: int = LAYERS) -> Shape:
    """Return the shape of Llama-3.1-8B with fewer layers and a proportionally smaller vocabulary.

    With all 128,256 tokens in the vocabulary, the head would take a third of a step with four layers.
    """
    return LLAMA_8B._replace(num_hidden_layers=layers, vocab_size=128256 * layers // 32)


LLAMA = llama()


def optimizer_of(model: Any, lr: float = 0.0, name: str = "adamw_torch") -> torch.optim.Optimizer:
    """Return an optimizer, and reset the model's adapters.

    Args:
        name: adamw_torch, adamw_torch_fused or paged_adamw_8bit, as ``optim`` of transformers' TrainingArguments.
    """
    parameters = reset(model)
    if name == "paged_adamw_8bit":
        from bitsandbytes.optim import PagedAdamW8bit

        paged: torch.optim.Optimizer = PagedAdamW8bit(parameters, lr=lr, weight_decay=0.0)
        return paged
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=name == "adamw_torch_fused")


Size = tuple[int, int]  # batch, tokens


class Step(step.Step):
    """A step with the patch and this cache, or without the patch.

    It records losses and the peak of allocated GPU memory, in bytes.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, size: Size, on: bool, cache: str | int = "off"):
        super().__init__(model, optimizer, size)
        self.on, self.cache = on, cache
        self.losses: list[float] = []
        self.peak = self.taken = self.calls = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Turn the patch on or off and run two warm-up steps, then run the ``with`` block."""
        with patch(self.on, cache=self.cache):
            for _ in range(2):  # the first step fills the cache and compiles
                self()
            yield

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
                self.peak = torch.cuda.max_memory_allocated()
            self.taken = sum(nf4_patch.status().cache.taken.values())
