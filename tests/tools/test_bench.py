"""Benchmarks are honest: no ratio without equal bits, a harness that finds wrong results, and no numbers without a GPU."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
from oracle import layout_of, quantized

from benchmarks import Bench, bits, challenge, generation, models, products, timing
from benchmarks.baselines import UNSLOTH_TRITON
from benchmarks.record import BITSANDBYTES, CEILING, OURS, Row, accuracy
from benchmarks.timing import Machine, Times

pytestmark = pytest.mark.full
MACHINE = Machine("a GPU", "90", "580.1", "SM clock 1 MHz", {"torch": "2.11.0", "triton": "3.6.0"})


def comparison(same: dict[str, bool]) -> Row:
    us = {OURS: 10.0, BITSANDBYTES: 25.0, UNSLOTH_TRITON: 11.0, CEILING: 9.5}
    times = {name: Times((value, value)) for name, value in us.items()}
    return Row("4096x4096 bf16", "us", times, bits(same), 42_000_000, {"n": 4096, "k": 4096})


@pytest.mark.parametrize(
    ("same", "ratios"),
    [
        ({BITSANDBYTES: True, UNSLOTH_TRITON: True}, {BITSANDBYTES: 2.5, UNSLOTH_TRITON: 1.1, CEILING: 0.95}),
        ({BITSANDBYTES: False, UNSLOTH_TRITON: True}, {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}),
        ({BITSANDBYTES: True, UNSLOTH_TRITON: False}, {BITSANDBYTES: 2.5, UNSLOTH_TRITON: None, CEILING: 0.95}),
        ({UNSLOTH_TRITON: False}, {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}),
        ({}, {BITSANDBYTES: None, UNSLOTH_TRITON: None, CEILING: None}),  # nothing was compared
    ],
)
def test_a_ratio_needs_the_bits_of_its_baseline_and_of_bitsandbytes(same, ratios):
    report = Bench(MACHINE, {"dequantize": [comparison(same)]}, {"dequantize": "how"})
    assert report.as_dict()["sections"]["dequantize"][0]["ratio"] == pytest.approx(ratios)
    assert report.exit_code == (not all(same.values()))
    text = "\n".join(report.render())
    shown = {BITSANDBYTES: "2.50x", UNSLOTH_TRITON: "1.10x", CEILING: "95.0%"}
    assert {name: words in text for name, words in shown.items()} == {n: bool(r) for n, r in ratios.items()}
    assert text.count("check failed") == list(ratios.values()).count(None)
    for name in (name for name, equal in same.items() if not equal):
        assert f"4096x4096 bf16: the bits differ from {name}" in text
    assert all(word in text for word in ("how", "a GPU", "580.1", "SM clock", "triton 3.6.0"))


def test_noise_is_a_variant_against_itself():
    assert Times((10.0, 11.0, 10.0, 11.0)).noise == pytest.approx(0.1)
    assert Times((10.0,)).noise == 0.0


def test_the_order_turns_every_round_and_a_warm_up_is_not_counted():
    said = []
    times = timing.alternating({"a": "a", "b": "b"}, lambda side: said.append(side) or len(said), rounds=2)
    assert "".join(said) == "baabba" and times["a"].values == (3, 6)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_step_is_in_the_dtype_that_the_gpu_computes_in(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = models.config_of(models.Shape(128, 256, 1, 2, 2), models.training_dtype())
    model = models.build_4bit(config, device="cpu")
    projection = model.model.layers[0].self_attn.q_proj
    assert (projection.compute_dtype, projection.weight.quant_state.dtype, model.lm_head.weight.dtype) == (dtype,) * 3


@pytest.mark.parametrize("nested", [True, False])
def test_exact_is_the_weight_before_rounding(nested):
    packed, state = quantized((96, 256), torch.float32, "cpu", nested=nested)
    weight = products.exact(layout_of(packed, state))
    assert weight.dtype is torch.float64
    assert torch.equal(weight.float(), products.reference.dequantize(layout_of(packed, state)))
    assert products.error(weight.float(), weight) < 1e-7


# benchmarks/


def right(layer):
    from nf4_patch import triton_dequantize_nf4

    return triton_dequantize_nf4(layer)


CHALLENGE = {  # a dequantization, and what it is compared with
    "right": (right, right),
    "scale": (lambda layer: right(layer) * 1.02, right),
    "dtype": (lambda layer: right(layer).float(), right),
    "transposed": (lambda layer: right(layer).t(), right),
    "unwritten": (lambda layer: torch.zeros_like(right(layer)), right),
    "shifted": (lambda layer: right(layer).roll(1), right),
    # as a wrong reference has it: bitsandbytes' own forward is the second check
    "both": (lambda layer: right(layer) * 1.1, lambda layer: right(layer) * 1.1),
}


@pytest.mark.parametrize("name", CHALLENGE)
def test_challenge_catches_a_wrong_dequantization(name):
    torch.manual_seed(0)
    mlp, x = challenge.MLP(128, 256, torch.bfloat16, "cpu"), torch.randn(2, 3, 128, dtype=torch.bfloat16)
    with contextlib.nullcontext() if name == "right" else pytest.raises(challenge.WrongResult):
        challenge.check(mlp, x, *CHALLENGE[name])


def test_challenge_total_is_the_sum_and_needs_every_part_equal():
    times = {OURS: Times((10.0, 10.0)), BITSANDBYTES: Times((25.0, 25.0))}
    rows = [Row("a", "s", times, bits({BITSANDBYTES: equal})) for equal in (True, False)]
    total = challenge.total(rows)
    assert total.times[OURS].values == (20.0, 20.0)
    assert not total.checks[BITSANDBYTES].passed and total.ratio(BITSANDBYTES) is None


def test_a_rate_needs_hits_and_the_accuracy_of_the_same_run():
    rates = {generation.STOCK: Times((100.0,)), OURS: Times((150.0,))}
    exact, off = ({"64x64": accuracy(error, 1e-3, "64x64 ")} for error in (1e-3, 1.02e-3))
    # hits, accuracy, difference of the logits: NaN is 0 / 0, nothing was computed
    runs = ((224, exact, 1e-2), (0, exact, 0.0), (224, off, 1e-2), (224, exact, math.nan))
    rows = [generation.row(8, "compiled", rates, *run) for run in runs]
    assert [row.ratio(generation.STOCK) for row in rows] == [1.5, None, None, None]
    report = Bench(MACHINE, {"generation": rows[:3]}, {"generation": "how"})
    assert report.exit_code == 1
    assert report.problems() == [
        "generation, batch 8, compiled: no fused matmul ran",
        "generation, batch 8, compiled: 64x64 error 1.020e-03 against fp64, dequantize + matmul 1.000e-03",
    ]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "one graph"])
@torch.no_grad()
def test_the_static_cache_gives_the_logits_of_the_whole_sequence(monkeypatch, fresh_dynamo, compiled):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    shape = models.Shape(256, 512, 2, 4, 2, vocab_size=97)
    model = models.build_4bit(models.config_of(shape), device="cpu").eval()
    side = generation.Generation(model, 3, compiled, cache=16)
    tokens, logits = [], []
    for _ in range(6):
        tokens.append(side.token.clone())
        logits.append(side.step())
    want = model(input_ids=torch.cat(tokens, 1), use_cache=False).logits
    assert products.error(torch.stack(logits, 1), want.double()) < 0.02
    assert int(side.cache.get_seq_length()) == 6
    side.restart()
    assert torch.equal(side.step(), logits[0])
