"""Kept activations on a GPU: bit-identical results, right counts, and no lack of memory that a run without them would not have."""

from __future__ import annotations

import gc

import pytest
import torch
from subprocess_python import program

import nf4_patch
from benchmarks.models import Shape, config_of
from benchmarks.training import optimizer_of, peft_model, trained
from nf4_patch.activations.layers import activations
from nf4_patch.graphs import shapes

pytestmark = pytest.mark.gpu
MIB = 2**20
SHAPE = Shape(1024, 2816, 6, 8, 4, vocab_size=4096)


@pytest.fixture(scope="module")
def model():
    return peft_model(config_of(SHAPE, torch.bfloat16))


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def batch(seed, size=(2, 512)):
    return torch.randint(3, 4000, size, generator=torch.Generator().manual_seed(seed)).cuda()


def loss_of(model, ids):
    with torch.autocast("cuda", torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def train(model, steps=8, size=(2, 512), **options):
    optimizer = optimizer_of(model, lr=1e-3)
    optimizer.zero_grad()
    torch.manual_seed(0)
    numbers = []
    with nf4_patch.enabled(**options):
        for step in range(steps):
            loss = loss_of(model, batch(step, size))
            loss.backward()
            numbers += [loss.detach(), *(p.grad.clone() for p in trained(model))]
            optimizer.step()
            optimizer.zero_grad()
        return numbers, nf4_patch.status().activations


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", ["off", "fused"])
@pytest.mark.parametrize("option", ["auto", "64GiB"])
def test_the_same_numbers(model, reentrant, lora, option):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    want, _ = train(model, lora=lora)
    got, found = train(model, lora=lora, activations=option)
    assert all(map(torch.equal, got, want))
    assert found.kept == found.layers == SHAPE.num_hidden_layers and not any(activations.taken.values())


def test_what_is_counted_is_what_is_held(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    held = {}
    for option in ("off", "64GiB"):
        with nf4_patch.enabled(lora="fused", activations=option):
            for step in range(3):
                loss_of(model, batch(step)).backward()
            before = torch.cuda.memory_allocated()
            loss = loss_of(model, batch(9))
            held[option] = torch.cuda.memory_allocated() - before
            counted = nf4_patch.status().activations.size
            del loss
            assert torch.cuda.memory_allocated() - before < MIB and not any(activations.taken.values())
    really = held["64GiB"] - held["off"]
    assert really <= counted <= 1.1 * really + MIB, (really, counted)


def test_a_limit_is_kept(model):
    with nf4_patch.enabled(activations="64GiB"):
        for step in range(3):
            loss_of(model, batch(step)).backward()
        one = nf4_patch.status().activations.size // SHAPE.num_hidden_layers
    got, found = train(model, activations=f"{int(2.5 * one)}B")
    assert found.kept == 2 and found.size <= 2.5 * one
    want, _ = train(model)
    assert all(map(torch.equal, got, want))


@pytest.mark.slow
@pytest.mark.parametrize("options", [["activations"], ["activations", "cache"]], ids=" and ".join)
def test_no_lack_of_memory_where_there_is_none_without_us(options):
    assert program("auto_cache", 0, 8, *options).stdout.endswith("auto\n")


@pytest.mark.slow
def test_the_profile_fast_in_much_memory_and_in_little():
    assert program("fast_in_little_memory", CUBLAS_WORKSPACE_CONFIG=":4096:8").stdout.endswith("equal\n")


def test_sixteen_lengths_take_no_more_memory_than_the_longest(model, monkeypatch):
    monkeypatch.setattr(shapes, "PRICE", 0)  # each length is recorded at its third call

    def peak(lengths):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with nf4_patch.enabled(lora="fused", graphs="auto", activations="64GiB"):
            for step, length in enumerate(lengths):
                loss_of(model, batch(step, (2, length))).backward()
            assert nf4_patch.status().graphs.shapes == len({*lengths})
        return torch.cuda.max_memory_allocated() - before

    model.gradient_checkpointing_enable({"use_reentrant": False})
    alone = peak([1024] * 8)
    assert peak([1024] * 2 + [*range(64, 1025, 64)] * 4) <= 1.15 * alone
