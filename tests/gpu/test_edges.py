"""Where the promise of the same bits ends and does not: graphs' private memory, allocator settings, autocast, aliases."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from oracle import quantized
from subprocess_python import program

import nf4_patch
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

pytestmark = pytest.mark.gpu

ALLOCATOR = (
    "",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[32:8,64:4,>:2]",
    "max_split_size_mb:64",
    "max_split_size_mb:100,roundup_power2_divisions:8",
    "expandable_segments:True",
)


@pytest.mark.parametrize("settings", ALLOCATOR)
def test_the_cache_counts_what_the_allocator_takes(settings):
    program("cache_memory", PYTORCH_CUDA_ALLOC_CONF=settings)


@pytest.mark.parametrize("cache", ["off", "1GiB"])
def test_the_first_use_in_the_warmup_of_a_graph(cache):
    program("first_use_in_warmup", cache)


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 300])
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_autocast_to_another_dtype(rows, autocast):
    """bitsandbytes' own path decides the dtype of the result; with the fused matmul it is the same."""
    packed, state = quantized((4096, 4096), torch.bfloat16, "cuda")
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", autocast):
        want = bnb.matmul_4bit(x, packed, state)
        nf4_patch.enable(matmul="auto")
        got = bnb.matmul_4bit(x, packed, state)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.05 * want.float().std().item())


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_result_over_its_own_input_is_the_originals(rows):
    packed, state = quantized((4096, 4096), torch.bfloat16, "cuda")
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        want = x.clone()
        bnb.matmul_4bit(want, packed, state, out=want)
        nf4_patch.enable(matmul="auto")
        got = x.clone()
        assert bnb.matmul_4bit(got, packed, state, out=got) is got
    named = counters.fallbacks["bitsandbytes.autograd._functions.matmul_4bit", Reason.OUT_MISMATCH]
    refused = counters.fallbacks["bitsandbytes.autograd._functions.matmul_4bit", Reason.NOT_FASTER]
    assert named + refused == 1
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.05 * want.float().std().item())
