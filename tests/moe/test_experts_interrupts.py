"""After Ctrl-C at any line of a merge of packed experts, each adapter is either merged or not merged."""

from __future__ import annotations

import inspect
from types import CodeType

import pytest
import torch
from interrupts import interrupted_at_every_line
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from tiny_experts import (
    STACKS,
    adapters_of,
    model_of,
    with_lora,
)
from torch.nn.utils import parametrize

from nf4_patch.libraries.bitsandbytes import packed
from nf4_patch.libraries.peft import experts as lora

ON = {"experts": "4bit"}
SUFFIXES = [f"experts.{stack}" for stack in STACKS]


@pytest.fixture(autouse=True)
def option(patched):
    return patched


def inside(function, name: str) -> CodeType:
    """Return the code of a function that another function defines."""
    return next(each for each in function.__code__.co_consts if getattr(each, "co_name", None) == name)


def body(replacement):
    """Return the function that ``@around`` decorates."""
    (cell,) = replacement.__closure__
    return cell.cell_contents


def tiny():
    return with_lora(model_of("qwen3", lora=False), lora_alpha=12, target_modules=[])


def equal(found, want) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))


MERGING = (
    body(lora.packed_again), lora.requantize, inside(lora.requantize, "replace"), packed.Chain.replace,
    packed.Chain.content, packed.Chain.before_merging, packed.content_of, packed.hash_of,
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "way", ["merge", *(pytest.param(way, marks=pytest.mark.full) for way in ("second", "unmerge"))]
)
def test_merging(way):
    """Every stack has the bytes that its list of merged adapters says. Unmerging restores the original bytes."""
    model, where = tiny(), []
    model.add_adapter("second", LoraConfig(r=2, target_parameters=SUFFIXES, init_lora_weights=False))
    for value in adapters_of(model).values():
        value.data.normal_(0, 0.05)
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    chain = wrapper.get_base_layer().parametrizations[wrapper.parameter_name]

    def content():
        return [tensor.clone() for tensor in (chain.original.data, *chain[0].quant_state.as_dict(packed=True).values())]

    want = {(): content()}
    for names in (["default"], ["default", "second"]):
        wrapper.merge(adapter_names=names[-1:])
        want[tuple(names)] = content()
    wrapper.unmerge()

    def before():
        if wrapper.merged:
            wrapper.unmerge()
        if way != "merge":
            wrapper.merge(adapter_names=["default"])

    call = (
        wrapper.unmerge
        if way == "unmerge"
        else lambda: wrapper.merge(adapter_names=[way] if way == "second" else ["default"])
    )
    pefts = inspect.unwrap(type(wrapper).unmerge if way == "unmerge" else type(wrapper).merge)
    for line in interrupted_at_every_line(call, pefts, *MERGING, before=before):
        where.append(line)
        assert equal(content(), want[tuple(wrapper.merged_adapters)]), line
        assert not parametrize._cache_enabled and not parametrize._cache, line
        if wrapper.merged:
            wrapper.unmerge()
        assert equal(content(), want[()]), line
        wrapper.merge(adapter_names=["default"])
        assert equal(content(), want["default",]), line
    assert len(where) > 30
