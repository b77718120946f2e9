"""Read the stop flag of ``generate()`` one token late, so that the host does not wait for the GPU at each token.

transformers' ``DeferredStopCheck`` does this, but only on Apple's GPUs. It computes one token too many and drops it. Here it also
runs where the decode steps are CUDA graphs. The random numbers of the dropped token are given back, so all later ones are as
without it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..nf4 import runtime
from ..patching.replacement import Function
from ..patching.targets import MODULES
from .shapes import graphs

LIBRARY = MODULES["generation"].rpartition(".")[0] + "."
CALLS_A_FUNCTION = (
    "PrefixConstrainedLogitsProcessor"  # a function of the script, which a further token would call once more
)


class Sample:
    """A call of ``_sample``.

    Args:
        is_plain: whether only the library's code gets the tokens, so that nobody sees the dropped one.
    """

    def __init__(self, is_plain: bool):
        self.is_plain = is_plain
        self.model: Any = None  # the model, if its decode steps run as a Step
        self.generator: Any = None  # the generator that draws the tokens, if the check is late
        self.before_step: Any = None  # its state before the latest step

    def step_begins(self) -> None:
        if self.generator is not None:
            self.before_step = self.generator.get_state()


class Current(threading.local):
    """The innermost call of ``_sample`` in this thread."""

    sample: Sample | None = None


current = Current()


def is_of_the_library(each: Any) -> bool:
    """Return whether a logits processor or a stopping criterion runs no code but transformers'."""
    kind = type(each)
    return kind.__module__.startswith(LIBRARY) and kind.__name__ != CALLS_A_FUNCTION


def sample(
    original: Function, model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """Replace ``GenerationMixin._sample``."""
    is_plain = not synced_gpus and streamer is None
    is_plain = is_plain and all(map(is_of_the_library, (*logits_processor, *stopping_criteria)))
    outer, current.sample = current.sample, Sample(is_plain)
    try:
        return original(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            **model_kwargs,
        )
    finally:
        current.sample = outer


def is_supported(
    original: Function, device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
) -> bool:
    """Replace ``DeferredStopCheck.is_supported``.

    A model without a recorded step is left alone, because its hooks, or code of the script, would see the dropped token.
    """
    if original(device, cache, cache_is_returned, is_assistant):
        return True
    now = current.sample
    if now is None or now.model is None or not now.is_plain or cache_is_returned or is_assistant:
        return False
    if device.type != runtime.DEVICE or not graphs.knows_step(now.model):
        return False
    now.generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return True


def finish(original: Function, check: Any) -> int:
    """Replace ``DeferredStopCheck.finish``, which returns how many tokens are dropped."""
    dropped: int = original(check)
    now = current.sample
    if dropped and now is not None and now.before_step is not None:
        now.generator.set_state(now.before_step)
    return dropped
