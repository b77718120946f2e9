"""benchmarks/ without a GPU: a harness that catches wrong results, what may be printed, and that a model runs."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch

from benchmarks import challenge, compile_time, generation
from nf4_patch.tools import llama
from nf4_patch.tools.bench.matmul import error
from nf4_patch.tools.bench.record import BITSANDBYTES, OURS, Bench, Row, accuracy, bits
from nf4_patch.tools.bench.step import Step
from nf4_patch.tools.bench.timing import Machine, Times


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return challenge.MLP(128, 256, torch.bfloat16, "cpu")


def right(layer):
    from nf4_patch import triton_dequantize_nf4

    return triton_dequantize_nf4(layer)


def test_challenge_passes_a_right_dequantization(mlp):
    challenge.check(mlp, torch.randn(2, 3, 128, dtype=torch.bfloat16), right, right)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda layer: right(layer) * 1.02, id="scale"),
        pytest.param(lambda layer: right(layer).float(), id="dtype"),
        pytest.param(lambda layer: right(layer).t(), id="transposed"),
        pytest.param(lambda layer: torch.zeros_like(right(layer)), id="unwritten"),
        pytest.param(lambda layer: right(layer).roll(1), id="shifted"),
    ],
)
def test_challenge_catches_a_wrong_dequantization(mlp, wrong):
    with pytest.raises(challenge.WrongResult):
        challenge.check(mlp, torch.randn(2, 3, 128, dtype=torch.bfloat16), wrong, right)


def test_challenge_catches_a_wrong_reference_by_the_forward(mlp):
    """A dequantization that equals a wrong reference still fails: bitsandbytes' own forward is the second check."""
    wrong = lambda layer: right(layer) * 1.1  # noqa: E731
    with pytest.raises(challenge.WrongResult):
        challenge.check(mlp, torch.randn(2, 3, 128, dtype=torch.bfloat16), wrong, wrong)


def test_challenge_total_is_the_sum_and_needs_every_part_equal():
    times = {OURS: Times((10.0, 10.0)), BITSANDBYTES: Times((25.0, 25.0))}
    rows = [Row("a", "s", times, bits({BITSANDBYTES: equal})) for equal in (True, False)]
    total = challenge.total(rows)
    assert total.times[OURS].values == (20.0, 20.0)
    assert not total.checks[BITSANDBYTES].passed and total.ratio(BITSANDBYTES) is None


def test_a_first_step_is_compiled_again(monkeypatch):
    model, folders = torch.nn.Linear(4, 1), []
    monkeypatch.setattr(torch, "compile", lambda m: folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]) or m)
    monkeypatch.setattr(Step, "__call__", lambda self: self.model(torch.ones(4)).sum().detach())
    step = object.__new__(compile_time.FirstStep)
    step.model, step.losses = model, []
    step(), step()
    assert folders[0] != folders[1] and step.model is model
    assert step.losses == [model(torch.ones(4)).item()] * 2


@pytest.mark.parametrize(
    ("ours", "stock", "agree"), [(12.53, 12.531, True), (12.53, 12.59, False), (12.59, 12.53, False)]
)
def test_losses_of_two_compilations_need_agree_to_rounding_only(ours, stock, agree):
    assert compile_time.agree([ours, ours], [stock]) is agree


def test_a_rate_needs_hits_and_accuracy():
    rates = {generation.STOCK: Times((100.0,)), OURS: Times((150.0,))}
    exact, off = ({"64x64": accuracy(error, 1e-3, "64x64 ")} for error in (1e-3, 2e-3))
    good = generation.row(8, "compiled", rates, 224, exact, 1e-2)
    silent = generation.row(8, "compiled", rates, 0, exact, 0.0)
    worse = generation.row(8, "compiled", rates, 224, off, 1e-2)
    empty = generation.row(8, "compiled", rates, 224, exact, math.nan)  # 0 / 0: nothing was computed
    assert good.ratio(generation.STOCK) == 1.5
    assert silent.ratio(generation.STOCK) is worse.ratio(generation.STOCK) is empty.ratio(generation.STOCK) is None
    report = Bench(
        Machine("a GPU", "90", "1", "clocks", {}), {"generation": [good, silent, worse]}, {"generation": "how"}
    )
    assert report.exit_code == 1
    assert report.problems() == [
        "generation, batch 8, compiled: no fused matmul ran",
        "generation, batch 8, compiled: 64x64 error 2.000e-03 against fp64, dequantize + matmul 1.000e-03",
    ]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "one graph"])
@torch.no_grad()
def test_the_static_cache_gives_the_logits_of_the_whole_sequence(monkeypatch, fresh_dynamo, compiled):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    shape = llama.Shape(256, 512, 2, 4, 2, vocab_size=97)
    model = llama.build_4bit(llama.config_of(shape), device="cpu").eval()
    side = generation.Generation(model, 3, compiled, cache=16)
    tokens, logits = [], []
    for _ in range(6):
        tokens.append(side.token.clone())
        logits.append(side.step())
    want = model(input_ids=torch.cat(tokens, 1), use_cache=False).logits
    assert error(torch.stack(logits, 1), want.double()) < 0.02
    assert int(side.cache.get_seq_length()) == 6
    side.restart()
    assert torch.equal(side.step(), logits[0])
