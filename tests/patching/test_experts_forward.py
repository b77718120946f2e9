"""The experts' forward of ours: the sums of transformers', with LoRA or without, however a step is run."""

from __future__ import annotations

import statistics

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny_experts import (
    ARCHITECTURES,
    CHECKPOINTING,
    DEVICE,
    LAYERS,
    Layer,
    dense_of,
    experts_of,
    hits,
    ids_of,
    model_of,
    reasons,
    same,
    with_lora,
)

from nf4_patch.nf4 import runtime
from nf4_patch.patching.context import backward_in_progress
from nf4_patch.patching.counters import counters
from nf4_patch.patching.experts import forward
from nf4_patch.patching.experts.product import Operand
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools.bench.matmul import error


class Own:
    """Takes the place of ``forward.why_not``, on a CPU too: None, counted, or a Reason."""

    def __init__(self) -> None:
        self.on, self.calls = True, 0

    def __call__(self, module, *_, **__) -> Reason | None:
        self.calls += self.on
        return None if self.on else Reason.EXPERTS_FORWARD


@pytest.fixture
def own(patched, monkeypatch):
    patched.enable(experts="4bit")
    found = Own()
    monkeypatch.setattr(forward, "why_not", found)
    return found


def theirs(own, function, *arguments):
    own.on = False
    result = function(*arguments)
    own.on = True
    return result


def adapted(name, dtype=torch.float32, lora=True):
    model = model_of(name, dtype, lora=False)
    attention = LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
    return with_lora(model) if lora else get_peft_model(model, attention)


def loss_of(model) -> torch.Tensor:
    """Of eight tokens: Triton's interpreter takes a second for the rows of a hundred."""
    return model(input_ids=ids_of(4), labels=ids_of(4)).loss


def step(model) -> dict[str, torch.Tensor]:
    """Every gradient of a training step."""
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rows(*first, others):
    """The first in every run, the others in the full one."""
    return [*first, *(pytest.param(*each, marks=pytest.mark.full) for each in others if each not in first)]


@pytest.mark.parametrize(
    ("name", "lora"),
    rows(
        ("qwen3", True), ("gpt-oss", False), others=[(name, lora) for name in ARCHITECTURES for lora in (True, False)]
    ),
)
def test_a_step_is_transformers(name, lora, own):
    """In fp32, where the orders of the sums differ and nothing else."""
    model = adapted(name, lora=lora)
    found, want = step(model), theirs(own, step, model)
    assert found.keys() == want.keys() and own.calls == LAYERS and not reasons()
    assert max(error(found[key], want[key]) for key in want) < 1e-5
    assert forward.is_silu_and_mul(experts_of(model)[0]) == (name not in ("gpt-oss", "gemma4"))
    assert same(step(model), found)  # run to run


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # Triton's interpreter truncates to bf16


def ratios_of(found, want, exact):
    return {key: error(found[key], exact[key]) / error(want[key], exact[key]) for key in exact}


def test_errors_of_a_step_are_no_larger_than_transformers(own):
    """Every gradient against fp64: on average, as those of single steps differ by a half either way."""
    ratios = []
    for seed in (1, 2):
        model = with_lora(model_of("qwen3", HALF, lora=False), seed=seed)
        dense = dense_of(model_of("qwen3", HALF, lora=False), torch.float64)
        dense.set_experts_implementation("eager")
        exact = theirs(own, step, with_lora(dense, seed=seed))
        ratios.append(ratios_of(step(model), theirs(own, step, model), exact))
    mean = {key: statistics.mean(found[key] for found in ratios) for key in ratios[0]}
    assert statistics.mean(mean.values()) <= 1.02 and max(mean.values()) < 1.3, mean


def test_errors_of_frozen_experts_are_no_larger_than_transformers(own):
    """The output and the gradients of the rows and of the router's weights, against fp64."""
    model = model_of("qwen3", HALF, lora=False)
    dense = dense_of(model, torch.float64)
    dense.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    hidden, weights, gradient = (torch.randn(size, generator=generator) for size in ((16, 64), (16, 2), (16, 64)))
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(16)]).to(DEVICE)

    def run(model):
        dtype = model.lm_head.weight.dtype
        inputs = [value.to(DEVICE, HALF).to(dtype).requires_grad_() for value in (hidden, weights)]
        output = experts_of(model)[0](inputs[0], ids, inputs[1])
        grads = torch.autograd.grad(output, inputs, gradient.to(DEVICE, HALF).to(dtype))
        return dict(zip(("output", "rows", "weights"), (output.detach(), *grads), strict=True))

    ratios = ratios_of(run(model), theirs(own, run, model), theirs(own, run, dense))
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    "how",
    ["recomputed", *(pytest.param(how, marks=pytest.mark.full) for how in ("reentrant", "cached", "accumulated"))],
)
def test_a_step_is_the_same_however_it_is_run(how, own, patched):
    model = adapted("qwen3")
    model.enable_input_require_grads()
    plain = step(model)
    if how in CHECKPOINTING:
        model.gradient_checkpointing_enable(CHECKPOINTING[how])
    if how == "cached":
        patched.enable(experts="4bit", cache="1GiB")
    if how == "accumulated":
        for _ in range(2):
            loss_of(model).backward()
        thrice = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert all(error(thrice[key], 3 * plain[key]) < 1e-5 for key in thrice)
    else:
        assert same(step(model), plain)
    assert own.calls > LAYERS and not reasons()


def test_a_recompute_ends_before_the_last_product(own, monkeypatch):
    """Nothing after it is saved: of a layer under a checkpoint two products of packed experts run, then one."""
    moe, finished = transformers.integrations.moe, []
    model, product = adapted("qwen3"), moe._grouped_mm
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(CHECKPOINTING["recomputed"])

    def counted(x, weight, offs):
        result = product(x, weight, offs=offs)
        finished.append(isinstance(weight, Operand))
        return result

    monkeypatch.setattr(moe, "_grouped_mm", counted)
    step(model)
    assert own.calls == 2 * LAYERS and sum(finished) == 3 * LAYERS


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt-oss", marks=pytest.mark.full)])
def test_a_recompute_that_chooses_another_expert(name, own):
    """The gradients of transformers' forward: those of the recompute, whose rows are sorted otherwise than the forward's."""
    model = adapted(name, lora=name == "qwen3")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(CHECKPOINTING["recomputed"])
    plain, flips = step(model), []

    def flip(router, inputs, output):
        if backward_in_progress() == -1:
            return output
        *others, ids = output
        ids = ids.clone()
        ids[2] = (ids[2] + 1) % 6  # a token that others attend to
        flips.append(router)
        return *others, ids

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    for router in routers:
        router.register_forward_hook(flip)
    found, want = step(model), theirs(own, step, model)
    assert len(routers) == LAYERS and len(flips) == 2 * LAYERS and own.calls == 4 * LAYERS and not reasons()
    assert max(error(found[key], want[key]) for key in want) < 1e-5
    assert max(error(want[key], plain[key]) for key in want) > 1e-2  # the flips were felt


def test_under_autocast(own):
    """Activations in fp32 and experts in 16 bits, as a Trainer runs them."""
    layer = Layer()
    hidden = layer.hidden.float().detach().requires_grad_()

    def run():
        with torch.autocast(DEVICE.type, torch.bfloat16):
            output = layer.experts(hidden, layer.ids, layer.weights.float())
        return output, torch.autograd.grad(output.square().sum(), hidden)[0]

    for found, want in zip(run(), theirs(own, run), strict=True):
        assert found.dtype is want.dtype and error(found, want) < 2**-6


def test_few_tokens_and_no_gradient(own):
    model = adapted("qwen3").eval()
    for tokens in (1, 5):
        with torch.no_grad():
            found = model(input_ids=ids_of(tokens)).logits
            assert error(found, theirs(own, lambda n=tokens: model(input_ids=ids_of(n)).logits)) < 1e-5
    assert own.calls == 2 * LAYERS and hits() == 8 * LAYERS


def test_where_it_serves(monkeypatch, patched):
    """Where it was measured to be faster, with the option on, without expert parallelism."""
    layer = Layer()
    where = {"capability": (9, 0)}
    monkeypatch.setattr(runtime, "capability_of", lambda device: where["capability"])
    hidden = torch.empty(0, device=DEVICE)
    assert (9, 0) in forward.FASTER_ON
    assert forward.why_not(layer.experts, hidden, layer.ids, layer.weights) is None
    where["capability"] = (7, 5)
    assert forward.why_not(layer.experts, hidden) is Reason.EXPERTS_FORWARD
    where["capability"] = (9, 0)
    layer.experts._is_expert_parallel = True
    assert forward.why_not(layer.experts, hidden) is Reason.EXPERTS_FORWARD
    layer.experts._is_expert_parallel = False
    name = next(target.name for target in patched.status().targets if target.name.endswith(".grouped_mm"))
    layer.forward()
    assert not counters.fallbacks[name, Reason.EXPERTS_FORWARD]  # plain enable(): not asked
    patched.enable(experts="4bit")
    monkeypatch.setattr(forward, "FASTER_ON", ())
    before = counters.fallbacks[name, Reason.EXPERTS_FORWARD]
    layer.forward()
    assert counters.fallbacks[name, Reason.EXPERTS_FORWARD] == before + 1  # what status() says
