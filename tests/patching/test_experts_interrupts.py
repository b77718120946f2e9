"""Ctrl-C at any line of the experts' LoRA: the next step, merge or adapter is what it would have been without it."""

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
    bytes_of,
    experts_of,
    hits,
    ids_of,
    model_of,
    reasons,
    same,
    step,
    with_lora,
)
from torch.nn.utils import parametrize

from nf4_patch.libraries.bitsandbytes import packed
from nf4_patch.libraries.peft import experts as lora
from nf4_patch.moe import forward, product

ON = {"experts": "4bit"}
SUFFIXES = [f"experts.{stack}" for stack in STACKS]


@pytest.fixture(autouse=True)
def option(patched):
    return patched


def inside(function, name: str) -> CodeType:
    """The code of a function that another one defines."""
    return next(each for each in function.__code__.co_consts if getattr(each, "co_name", None) == name)


def body(replacement):
    """The function under ``@around``."""
    (cell,) = replacement.__closure__
    return cell.cell_contents


def tiny():
    return with_lora(model_of("qwen3", lora=False), lora_alpha=12, target_modules=[])


def equal(found, want) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))


def test_a_step():
    model, where = tiny(), []
    want = step(model)
    functions = (
        inside(lora.forward, "run"), lora.Wrapper.__init__, lora.Wrapper.factors,
        forward.forward, forward.in_pytorch, forward.products, forward.Order.of, product.SavedExperts.__init__,
        product.SavedExperts.dense, product.FrozenProduct.forward, product.FrozenProduct.backward, product.ExpertWeight.factors,
    )  # fmt: skip
    for line in interrupted_at_every_line(lambda: step(model), *functions):
        where.append(line)
        assert not lora.active_wrappers.of(experts_of(model)[0]), line
        assert not parametrize._cache_enabled and not parametrize._cache, line
        before = hits()
        assert same(step(model), want) and hits() > before and not reasons(), line
        assert not any(reference() for reference in lora.active_wrappers.references), line
    assert len(where) > 60


def test_an_adapter_that_is_switched_off_after_an_interrupt_is_off():
    """Also where the interrupt came before the experts' forward asked for it."""
    model = tiny()
    with model.disable_adapter(), torch.no_grad():
        want = model(input_ids=ids_of(4)).logits
    for line in interrupted_at_every_line(lambda: step(model), inside(lora.forward, "run"), lora.Wrapper.__init__):
        with model.disable_adapter(), torch.no_grad():
            assert torch.equal(model(input_ids=ids_of(4)).logits, want), line


MERGING = (
    body(lora.packed_again), lora.requantize, inside(lora.requantize, "replace"), packed.Chain.replace,
    packed.Chain.content, packed.Chain.before_merging, packed.content_of, packed.hash_of,
)  # fmt: skip


@pytest.mark.parametrize(
    "way", ["merge", *(pytest.param(way, marks=pytest.mark.full) for way in ("second", "unmerge"))]
)
def test_merging(way):
    """The bytes of every stack are those that its list of merged adapters says, and what is merged comes out to the bit."""
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


@pytest.mark.full
def test_putting_adapters_on():
    """The experts are what they were, and hold what they held."""
    models, where = [], []

    def before():
        models[:] = [tiny()]

    def add():
        models[0].add_adapter("second", LoraConfig(r=2, target_parameters=SUFFIXES))

    def shape():
        return [
            (type(m), list(m._parameters), list(m._modules), list(m.parametrizations)) for m in experts_of(models[0])
        ]

    before()
    want, held, kinds = step(models[0]), bytes_of(models[0]), shape()
    functions = body(lora.inject), inspect.unwrap(lora.seen_dense), inside(inspect.unwrap(lora.seen_dense), "restore")
    for line in interrupted_at_every_line(add, *functions, before=before):
        where.append(line)
        found = shape()
        assert [kind[1:] for kind in found] == [kind[1:] for kind in kinds], line
        assert all(parametrize.is_parametrized(module, name) for module in experts_of(models[0]) for name in STACKS), (
            line
        )
        assert equal(bytes_of(models[0]), held), line
        models[0].set_adapter("default")
        assert same(step(models[0]), want), line
    assert len(where) > 20
