"""LoRA on the experts of a mixture, packed and in 16 bits: peft's files and meaning, another product."""

from __future__ import annotations

import copy
import warnings

import peft.tuners.lora.layer as peft_layer
import pytest
import torch
from accelerate import cpu_offload
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from subprocess_python import program
from tiny_experts import (
    ARCHITECTURES,
    CHECKPOINTING,
    CONFIGS,
    DEVICE,
    LAYERS,
    STACKS,
    adapters_of,
    decoded,
    dense_of,
    experts_of,
    hits,
    ids_of,
    model_of,
    reasons,
    same,
    step,
    with_lora,
)
from transformers import AutoModelForCausalLM

from nf4_patch.patching.cache.cache import cache
from nf4_patch.patching.reasons import Reason


@pytest.fixture(autouse=True)
def option(patched):
    patched.enable(experts="4bit")
    return patched


@pytest.fixture
def stock(option):
    """What peft itself does with the same adapters on another model."""

    def stocked(model, run=step, **changes):
        option.disable()
        result = run(with_lora(model, **changes))
        option.enable(experts="4bit")
        return result

    return stocked


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids_of()).logits


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


# --- the numbers ---


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_frozen_experts_are_the_same_to_the_bit(name, option):
    model = model_of(name, lora=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    ours = step(model)
    assert hits() >= 3 * LAYERS and not reasons()
    option.disable()
    assert same(ours, step(model))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "16 bits"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_errors_are_no_larger_than_pefts(name, packed, stock):
    """Of the loss and of every gradient, against the same formula in fp64; peft's on experts in 16 bits."""
    model = model_of(name, lora=False)
    dense, exact = dense_of(model), dense_of(model, torch.float64)
    exact.set_experts_implementation("eager")
    exact = stock(exact)
    ours, peft = step(with_lora(model if packed else copy.deepcopy(dense))), stock(dense)
    assert ours.keys() == peft.keys() == exact.keys() and len(ours) > 4 * LAYERS
    assert bool(hits()) == packed
    ratios = {key: error(ours[key], exact[key]) / error(peft[key], exact[key]) for key in exact if "experts" in key}
    assert len(ratios) == 4 * LAYERS
    assert sum(ratios.values()) <= len(ratios) and max(ratios.values()) < 1.25, ratios
    assert error(ours["loss"], exact["loss"]) < 2**-9
