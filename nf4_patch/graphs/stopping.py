"""Read the stop flag of ``generate()`` one token late, so that the host does not wait for the GPU at each token.

transformers' class ``DeferredStopCheck`` does this on Apple's GPUs only. It computes one token too many and drops this
token. This module also enables the class if the decode steps are CUDA graphs. It then resets the random generator to
its state before the dropped token.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..patching.dequantizer import is_called_by
from ..patching.replacement import Function
from ..patching.targets import MODULES
from .calls import why_not_here
from .own_code import functions_in, is_function, is_library
from .recording import why_no_capture
from .shapes import graphs

GENERATION = MODULES["generation"]
LIBRARY = GENERATION.rpartition(".")[0] + "."
# COUNTING: processors that count tokens. The same object may serve several calls of generate().
COUNTING = {"SynthIDTextWatermarkLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor"}
# AT_EACH_TOKEN: methods of a model that ``_sample`` calls besides the decode step
AT_EACH_TOKEN = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_has_unfinished_sequences"


class Sample:
    """One call of transformers' ``GenerationMixin._sample``.

    ``is_plain`` says whether only transformers' code reads the tokens, so that nobody sees the dropped one.
    """

    def __init__(self, is_plain: bool):
        self.is_plain = is_plain
        self.model: Any = None  # the model, if its decode steps run as a Step
        self.generator: Any = None  # the generator that draws the tokens, if the check is late
        self.before_step: Any = None  # its state before the latest step
        self.steps = 0

    def step_begins(self) -> None:
        if self.generator is not None:
            self.before_step = self.generator.get_state()
            self.steps += 1

    def finished(self, tokens: Tensor, prompt: int) -> Tensor:
        """Return the result of ``_sample``. If a token was dropped, undo its random numbers and free its memory.

        ``prompt`` is the length of the prompt.
        """
        if self.generator is None or tokens.shape[1] - prompt > self.steps:
            return tokens
        self.generator.set_state(self.before_step)
        return tokens.clone(memory_format=torch.contiguous_format)


class Current(threading.local):
    """Holds the innermost call of ``_sample`` in this thread."""

    sample: Callable[[], Sample | None] = staticmethod(lambda: None)


current = Current()


def is_of_the_library(each: Any) -> bool:
    """Return whether a logits processor, a stopping criterion or a list of them runs only transformers' code."""
    kind = type(each)
    if not kind.__module__.startswith(LIBRARY) or kind.__name__ in COUNTING:
        return False
    if any(map(callable, vars(each).values())):  # a function of the script, or a model, which may have hooks
        return False
    methods = [value for base in kind.__mro__ for value in vars(base).values() if is_function(value)]
    if not all(is_library(function) for method in methods for function in functions_in(method)):
        return False
    return not isinstance(each, list) or all(map(is_of_the_library, each))


def sample(
    original: Function, model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """Replace ``GenerationMixin._sample``. If a late stop check dropped a token, undo its random numbers."""
    # A caller other than ``generate`` might keep the cache, which is a token ahead.
    is_plain = not synced_gpus and streamer is None and is_called_by(GENERATION)
    is_plain = is_plain and is_of_the_library(logits_processor) and is_of_the_library(stopping_criteria)
    now, outer = Sample(is_plain), current.sample
    try:
        current.sample = weakref.ref(now)
        found = original(
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
    return now.finished(found, input_ids.shape[1])


def is_supported(
    original: Function, device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
) -> bool:
    """Replace ``DeferredStopCheck.is_supported``. Also return True for a model whose decode step is recorded.

    In any other model, hooks or code of the script might see the dropped token.
    """
    if original(device, cache, cache_is_returned, is_assistant):
        return True
    now = current.sample()
    if now is None or now.model is None or not now.is_plain or cache_is_returned or is_assistant:
        return False
    methods = [getattr(now.model, name) for name in AT_EACH_TOKEN]
    if not all(is_library(function) for method in methods for function in functions_in(method)):
        return False
    if device.type != runtime.DEVICE or why_not_here() is not None or not graphs.knows_step(now.model):
        return False
    if why_no_capture() is not None:  # another thread may draw random numbers, or a profiler counts the calls
        return False
    now.generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return True
