"""Replacements for transformers' decoder layers, for decode steps and the stop check of ``generate``, and for ``repeat_kv``."""

from __future__ import annotations

import dataclasses

from ...activations.layers import kept
from ...graphs import steps, stopping
from ...graphs.layers import graphed
from ...patching.replacement import Function, around
from ...patching.target import Target
from . import attention

valid_auto_compile_criteria = around(steps.valid_auto_compile_criteria)
compiled_call = around(steps.compiled_call)
sample = around(stopping.sample)
is_supported = around(stopping.is_supported)
repeat_kv = around(attention.repeat_kv)


def decoder_layer(target: Target, original: Function) -> Function:
    """Make the replacement for the call of a decoder layer, which runs the layer as CUDA graphs.

    If graphs refuse the call, ``kept`` decides whether the layer keeps its activations or runs as in transformers.
    """
    inner = kept(dataclasses.replace(target, option="activations", or_option=""), original)
    inner.__nf4_patch__ = inner, Target  # type: ignore[attr-defined]
    return graphed(dataclasses.replace(target, or_option=""), inner, original)
