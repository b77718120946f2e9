"""nf4_patch's forward of the experts computes the same values as transformers', with and without LoRA, in every kind of step."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import statistics
import sys
import weakref

import pytest
import tiny_experts
import torch
import transformers
from alternation import crossed
from peft import LoraConfig, get_peft_model
from target import Seen
from tiny_experts import (
    ARCHITECTURES,
    CHECKPOINTING,
    DEVICE,
    LAYERS,
    STACKS,
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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import nf4_patch
from benchmarks.products import error
from nf4_patch.libraries.transformers import EXPERTS_INTERFACE
from nf4_patch.moe import forward, launch
from nf4_patch.moe.product import ExpertWeight
from nf4_patch.nf4 import runtime
from nf4_patch.patching.context import backward_in_progress, modes_active
from nf4_patch.patching.counters import counters
from nf4_patch.patching.placement import get_attr, put
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.targets import TARGETS

ON = {"experts": "4bit"}
GROUPED = f"{EXPERTS_INTERFACE}.grouped_mm".replace(":", ".")
PARAM_WRAPPER = "peft.tuners.lora.layer.ParamWrapper.forward"
modeling = transformers.models.qwen3_moe.modeling_qwen3_moe


class Own:
    """Stand-in for ``launch.supports``. It chooses the kernels, also on a CPU, or PyTorch, and counts the calls."""

    def __init__(self) -> None:
        self.on, self.calls = True, 0

    def __call__(self, tensor) -> bool:
        self.calls += self.on
        return self.on


@pytest.fixture
def own(patched, monkeypatch):
    found = Own()
    monkeypatch.setattr(launch, "supports", found)
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


step = functools.partial(tiny_experts.step, tokens=4)  # Triton's interpreter takes a second for the rows of a hundred


@pytest.mark.parametrize(("name", "lora"), crossed(ARCHITECTURES, (True, False)))
def test_a_step_is_transformers(name, lora, own):
    """In fp32, results differ from transformers' only by the order of sums."""
    model = adapted(name, lora=lora)
    found, want = step(model), theirs(own, step, model)
    assert found.keys() == want.keys() and own.calls == LAYERS and not reasons()
    assert max(error(found[key], want[key]) for key in want) < 1e-5
    assert forward.is_silu_and_mul(experts_of(model)[0]) == (name not in ("gpt-oss", "gemma4"))
    assert same(step(model), found)  # run to run


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # Triton's interpreter truncates to bf16


def ratios_of(found, want, exact):
    return {key: error(found[key], exact[key]) / error(want[key], exact[key]) for key in exact if key != "loss"}


@pytest.mark.full
def test_errors_of_a_step_are_no_larger_than_transformers(own):
    """Compare the error of every gradient against fp64, averaged over steps, because errors of single steps vary by half."""
    ratios = []
    for seed in (1, 2):
        model = with_lora(model_of("qwen3", HALF, lora=False), seed=seed)
        dense = dense_of(model_of("qwen3", HALF, lora=False), torch.float64)
        dense.set_experts_implementation("eager")
        exact = theirs(own, step, with_lora(dense, seed=seed))
        ratios.append(ratios_of(step(model), theirs(own, step, model), exact))
    mean = {key: statistics.mean(found[key] for found in ratios) for key in ratios[0]}
    assert statistics.mean(mean.values()) <= 1.02 and max(mean.values()) < 1.3, mean


@pytest.mark.full
def test_errors_of_frozen_experts_are_no_larger_than_transformers(own):
    """Compare the errors of the output and of the gradients of input and router weights against fp64."""
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


@pytest.mark.full
@pytest.mark.parametrize("how", ["recomputed", "reentrant"])
def test_a_checkpointed_step_is_the_same(how, own):
    """A checkpointed step equals a step without checkpointing. test_experts_lora.py has the same test for the forward
    in PyTorch.
    """
    model = adapted("qwen3")
    model.enable_input_require_grads()
    plain = step(model)
    model.gradient_checkpointing_enable(CHECKPOINTING[how])
    assert same(step(model), plain) and own.calls > LAYERS and not reasons()


@pytest.mark.full
def test_a_recompute_ends_before_the_last_product(own, monkeypatch):
    """No tensor is saved after the last product. A checkpointed layer therefore runs two products in the forward, and one in the recompute."""
    model, product, finished = adapted("qwen3"), ExpertWeight.multiplied, []
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(CHECKPOINTING["recomputed"])

    def counted(*arguments):
        result = product(*arguments)
        finished.append(arguments)
        return result

    monkeypatch.setattr(ExpertWeight, "multiplied", counted)
    step(model)
    assert own.calls == 2 * LAYERS and len(finished) == 3 * LAYERS


def test_nothing_of_a_checkpointed_step_is_left(own):
    """No tensor of a step stays alive.

    Layers of Gemma 4 share a dict of keys and values, which could tie a recompute's inputs to the graph.
    """
    model, inputs = adapted("gemma4"), []
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(CHECKPOINTING["recomputed"])
    for layer in model.get_base_model().model.layers:
        layer.register_forward_pre_hook(lambda layer, arguments: inputs.append(weakref.ref(arguments[0])))
    step(model)
    gc.collect()
    assert own.calls == 2 * LAYERS and inputs and not any(reference() is not None for reference in inputs)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt-oss", marks=pytest.mark.full)])
def test_a_recompute_that_chooses_another_expert(name, own):
    """The gradients equal those of transformers' forward, although the recompute sorts the rows in another order."""
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


@pytest.mark.full
def test_under_autocast(own):
    """Activations and the router's weights are fp32 and experts 16-bit, as in a Trainer. The router is trained too."""
    layer = Layer()
    inputs = [value.float().detach().requires_grad_() for value in (layer.hidden, layer.weights)]

    def run():
        with torch.autocast(DEVICE.type, torch.bfloat16):
            output = layer.experts(inputs[0], layer.ids, inputs[1])
        return output, *torch.autograd.grad(output.square().sum(), inputs)

    for found, want in zip(run(), theirs(own, run), strict=True):
        assert found.dtype is want.dtype and error(found, want) < 2**-6


def test_few_tokens_and_no_gradient(own):
    model = adapted("qwen3").eval()
    for tokens in (1, 5):
        with torch.no_grad():
            found = model(input_ids=ids_of(tokens)).logits
            assert error(found, theirs(own, lambda n=tokens: model(input_ids=ids_of(n)).logits)) < 1e-5
    assert own.calls == 2 * LAYERS and hits() == 8 * LAYERS


def test_a_torch_function_mode_sees_what_it_sees_without_the_patch(own):
    layer = Layer()

    def run():
        with torch.no_grad(), Seen() as mode:
            return mode.functions, layer.experts(layer.hidden, layer.ids, layer.weights)

    found, got = run()
    assert own.calls == 0 and set(reasons()) == {Reason.FUNCTION_MODE}
    counters.reset()
    nf4_patch.disable()
    stock, want = run()
    assert found == stock and torch.equal(got, want)


def test_under_a_transform(own):
    """The PyTorch forward runs under torch.func, which our autograd functions do not support, and with a hook on the activation."""
    layer, calls = Layer(), []
    ours = torch.func.vjp(lambda hidden: layer.experts(hidden, layer.ids, layer.weights), layer.hidden.detach())[0]
    assert reasons() == {Reason.FUNCTORCH_TRANSFORM: 2}
    counters.reset()
    own.on = False
    assert torch.equal(ours, layer.forward())
    own.on = True
    layer.experts.act_fn.register_forward_hook(lambda *_: calls.append(1))
    assert torch.isfinite(layer.forward()).all() and calls == [1] and own.calls


@pytest.mark.parametrize("trace", [make_fx, functools.partial(torch.jit.trace, check_trace=False)], ids=["fx", "jit"])
def test_a_trace_has_every_operation(trace, own):
    """A trace repeats PyTorch's operations. It would leave out the launch of a kernel, and read memory that nothing wrote."""
    layer = Layer()
    hidden, other = layer.hidden.detach(), torch.randn_like(layer.hidden)

    def run(hidden):
        return layer.experts(hidden, layer.ids, layer.weights)

    with torch.no_grad():
        traced = (lambda *given: trace(run)(*given)) if trace is make_fx else (lambda hidden: trace(run, hidden))
        assert torch.equal(traced(hidden)(other), theirs(own, run, other))
        assert not torch.equal(run(other), theirs(own, run, hidden))


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("how", ["kept", "recomputed"])
def test_a_dispatch_mode_sees_pytorchs_operations(how, where, own, monkeypatch):
    """The recompute repeats the forward's choice, so that both save the same tensors."""
    start = launch.start
    monkeypatch.setattr(launch, "start", lambda *given, **more: watched.append(modes_active()) or start(*given, **more))
    model, watched = adapted("qwen3"), []
    model.enable_input_require_grads()
    if how != "kept":
        model.gradient_checkpointing_enable(CHECKPOINTING[how])

    def run():
        model.zero_grad()
        with FlopCounterMode(display=False) if where != "backward" else contextlib.nullcontext():
            loss = model(input_ids=ids_of(4), labels=ids_of(4)).loss
        with FlopCounterMode(display=False) if where != "forward" else contextlib.nullcontext():
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    found, want = run(), theirs(own, run)
    assert all(error(a, b) < 1e-5 for a, b in zip(found, want, strict=True))
    assert all(map(torch.equal, found, want)) == (not watched) == (where != "backward")
    # A recompute that repeats the choice of kernels launches them in the mode.
    assert not any(watched) or how == "recomputed"


def test_a_tensor_subclass(own):
    """A subclass might have no memory of its own, so the kernels cannot read it."""
    layer = Layer()
    hidden, other = layer.hidden.detach(), torch.randn_like(layer.hidden)

    def run(hidden):
        hidden = hidden.requires_grad_()
        y = layer.experts(hidden, layer.ids, layer.weights)
        (gradient,) = torch.autograd.grad(y, hidden, torch.ones_like(y))
        return y.detach(), gradient

    found = run(TwoTensor(hidden.clone(), other.clone()))
    want = [theirs(own, run, each.clone()) for each in (hidden, other)]
    for both, first, second in zip(found, *want, strict=True):
        assert torch.equal(both.a, first) and torch.equal(both.b, second)


@pytest.mark.parametrize("how", ["written", "written as data", "of inference mode"])
def test_router_weights_that_change_before_the_backward(how, own):
    """transformers' forward saves a copy of the router's weights."""
    layer = Layer()
    with torch.inference_mode(how == "of inference mode"):
        weights = layer.weights * 1
    output = layer.experts(layer.hidden, layer.ids, weights)
    if how != "of inference mode":
        (weights.data if how == "written as data" else weights).mul_(2)
    assert torch.equal(layer.gradient(output), layer.step()[1]) and own.calls == 2


@pytest.mark.parametrize("kernels", [True, False])
def test_no_tokens(kernels, own):
    layer = Layer()
    own.on = kernels
    output = layer.experts(layer.hidden[:0], layer.ids[:0], layer.weights[:0])
    assert output.shape == (0, 64)
    (gradient,) = torch.autograd.grad(output.sum(), layer.hidden)
    assert not gradient.any()


def test_where_the_kernels_serve(monkeypatch):
    monkeypatch.undo()
    where = {"capability": (7, 5), "kind": True}
    monkeypatch.setattr(runtime, "capability_of", lambda device: where["capability"])
    monkeypatch.setattr(runtime, "runs_on", lambda tensor: where["kind"])
    tensor = torch.empty(0)
    assert launch.supports(tensor)
    where["capability"] = (7, 0)
    assert not launch.supports(tensor)
    where.update(capability=(9, 0), kind=False)
    assert not launch.supports(tensor)
    where["kind"] = True
    monkeypatch.setattr(launch, "triton", None)
    assert not launch.supports(tensor)


def test_experts_spread_over_processes_are_transformers(patched):
    """peft adds LoRA to the dense experts, which transformers' forward computes."""
    for model in (model_of("qwen3"), with_lora(model_of("qwen3", lora=False))):
        for module in experts_of(model):
            module._is_expert_parallel = True
        before = hits()
        found = step(model)
        assert set(reasons()) <= {Reason.EXPERT_PARALLEL, Reason.SECOND_PARAMETRIZATION} and hits() == before
        assert counters.fallbacks[TARGET, Reason.EXPERT_PARALLEL]
        patched.disable()
        assert same(found, step(model))
        patched.enable(experts="4bit")


TARGET = "transformers.integrations.moe.ExpertsInterface._global_mapping.grouped_mm"


def exact_layer(trains: tuple[str, ...] = (), frozen: bool = False):
    """Return the experts of a layer in fp32. The stacks in ``trains`` are dense and trained."""
    packed = tuple(stack for stack in tiny_experts.STACKS if stack not in trains)
    experts = experts_of(model_of("qwen3", torch.float32, lora=False, stacks=packed))[0]
    hidden = torch.linspace(-1, 1, 4 * 64, device=DEVICE).view(4, 64).requires_grad_(not frozen)
    weights = torch.linspace(0.1, 0.9, 8, device=DEVICE).view(4, 2).requires_grad_(not frozen)
    ids = torch.arange(8, device=DEVICE).view(4, 2) % 6
    dense = [getattr(experts, name) for name in trains]
    for parameter in experts.parameters():
        parameter.requires_grad_(any(parameter is each for each in dense))
    return experts, (hidden, ids, weights), [*dense, *(() if frozen else (hidden, weights))]


@pytest.mark.parametrize("trains", [("down_proj",), ("gate_up_proj",)])
def test_trained_dense_stacks_get_the_gradients_of_transformers(trains, own):
    experts, arguments, leaves = exact_layer(trains)

    def gradients():
        return torch.autograd.grad(experts(*arguments).square().sum(), leaves)

    found, want = gradients(), theirs(own, gradients)
    assert own.calls and max(map(error, found, want)) < 1e-5
    nf4_patch.disable()
    stock = gradients()
    nf4_patch.enable(**ON)
    assert max(map(error, found, stock)) < 1e-5


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.tensor(1.5, device=DEVICE))

    def forward(self, weight):
        return weight * self.by


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "how"), [("qwen3", "base"), ("gpt-oss", "base"), ("qwen3", "parametrization")])
def test_a_trained_down_proj_under_lora_and_a_users_parametrization(name, how, own):
    model = model_of(name, torch.float32, lora=False, stacks=() if how == "base" else tiny_experts.STACKS)
    if how == "parametrization":
        for experts in experts_of(model):
            torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", Scale(), unsafe=True)
    else:
        model = with_lora(model, target_parameters=["experts.gate_up_proj"])
        for parameter in [each for name, each in model.named_parameters() if "down_proj" in name]:
            parameter.requires_grad_()
    found = step(model)
    assert own.calls == LAYERS
    nf4_patch.disable()
    want = step(model)
    nf4_patch.enable(**ON)
    named = [key for key in want if "down_proj" in key]
    assert found.keys() == want.keys() and len(named) >= LAYERS
    for key in want:  # the gradient of ``by`` is a sum over all weights, nearly zero, so that it amplifies rounding
        assert error(found[key], want[key]) < (1e-4 if key.endswith(".by") else 1e-5), key


def doubling(function, wrapped):
    def theirs(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    theirs.__signature__ = inspect.signature(function)
    return functools.wraps(function)(theirs) if wrapped else theirs


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "when", "wrapped", "stacks"),
    [
        pytest.param(*each, marks=() if number in (0, 5, 10, 15) else pytest.mark.full)
        for number, each in enumerate(
            itertools.product((GROUPED, PARAM_WRAPPER), ("before", "after"), (False, True), ((), STACKS))
        )
    ],
)
def test_a_function_that_somebody_put_in_place_runs(place, when, wrapped, stacks, patched):
    """The replaced function runs, with peft's own LoRA. functools.wraps makes it look like the library's function."""
    target = next(target for target in TARGETS if target.name == place)
    holder = target.holder(sys.modules[target.module])
    patched.disable()
    library = get_attr(*holder)
    try:
        if when == "after":
            patched.enable(**ON)
        put(*holder, doubling(get_attr(*holder), wrapped))
        patched.enable(**ON)
        model = with_lora(model_of("qwen3", torch.float32, lora=False, stacks=stacks))
        counters.reset()
        found = step(model)
        refused = counters.fallbacks[place, Reason.REPLACED]
        ours = when == "after" and place == PARAM_WRAPPER  # their wrapper calls our replacement
        assert bool(refused) == (when == "before") and bool(hits()) == (ours and stacks != ())
        patched.disable()
        want = step(model)
        assert max(error(found[key], want[key]) for key in want) < 1e-5 if ours else same(found, want)
        put(*holder, library)
        assert not same(step(model), want)
    finally:
        patched.disable()
        put(*holder, library)
    patched.enable(**ON)
    assert get_attr(*holder) is not library and same(step(model), step(with_lora(model.unload())))
    assert not counters.fallbacks[place, Reason.REPLACED] or when == "before"


def by_subclass(monkeypatch):
    class MyExperts(modeling.Qwen3MoeExperts):
        def forward(self, *args):
            return 2 * super().forward(*args)

    monkeypatch.setattr(modeling, "Qwen3MoeExperts", MyExperts)


def by_class(monkeypatch):
    kind = modeling.Qwen3MoeExperts
    monkeypatch.setattr(kind, "forward", doubling(kind.forward, wrapped=True))


def by_instance(module):
    module.forward = doubling(type(module).forward.__get__(module), wrapped=True)


def alone(module):
    """Give the module a forward that calls nothing of the library."""
    module.forward = lambda x, ids, weights: x + module.down_proj.sum() + module.gate_up_proj.sum()


@pytest.mark.every(2)
@pytest.mark.parametrize("stacks", [(), STACKS], ids=["16 bits", "packed"])
@pytest.mark.parametrize("way", [by_subclass, by_class, by_instance, alone, "eager"])
def test_an_own_forward_of_the_experts_runs(way, stacks, patched, monkeypatch):
    if way in (by_subclass, by_class):
        way(monkeypatch)
    model = model_of("qwen3", torch.float32, lora=False, stacks=stacks)
    for module in experts_of(model) * (way in (by_instance, alone)):
        way(module)
    if way == "eager":
        model.set_experts_implementation("eager")
    model = with_lora(model)
    found = step(model)
    patched.disable()
    assert not hits() and same(found, step(model))


@pytest.mark.parametrize("trains", [(), ("down_proj",)])
def test_batched_gradients_and_second_derivatives(trains, own):
    experts, arguments, leaves = exact_layer(trains)

    def results():
        y = experts(*arguments)
        vectors = torch.linspace(-1, 1, 2 * y.numel(), device=DEVICE).view(2, *y.shape)
        batched = torch.autograd.grad(y, leaves, vectors, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        hidden, *others = arguments
        jacobian = torch.autograd.functional.jacobian(lambda x: experts(x, *others), hidden.detach(), vectorize=True)
        return *batched, *second, jacobian

    found, want = results(), theirs(own, results)
    assert own.calls and max(map(error, found, want)) < 1e-5


@pytest.mark.full
def test_second_derivatives_with_lora(own):
    model = adapted("qwen3")

    def results():
        loss = model(input_ids=ids_of(4), labels=ids_of(4)).loss
        leaves = [parameter for name, parameter in model.named_parameters() if "experts" in name and "lora_" in name]
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    found, want = results(), theirs(own, results)
    assert own.calls and max(map(error, found, want)) < 1e-4


def test_a_frozen_layer_keeps_nothing(own):
    experts, arguments, _ = exact_layer(frozen=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("a tensor was saved"), lambda each: each):
        output = experts(*arguments)
    assert own.calls and not output.requires_grad
    output.cpu().numpy()
