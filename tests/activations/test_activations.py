"""Kept layers have the bits of recomputed layers, their memory is counted, and unsupported calls are refused for a Reason.

The heap stands in for a GPU's memory (support/heap.py). gpu/test_activations_gpu.py and programs/ use a real GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from alternation import crossed, thinned
from heap import Memory
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import nf4_patch
from benchmarks.checkpoint import load_4bit
from nf4_patch.activations import layers as module
from nf4_patch.activations.layers import activations
from nf4_patch.cache.store import cache
from nf4_patch.memory import spare as memory
from nf4_patch.memory.spare import User, spare
from nf4_patch.patching.checkpoint import Checkpoint
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU; on a GPU: gpu/test_activations_gpu.py")
MIB, GIB = 2**20, 2**30
LAYERS = 4
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
NON_REENTRANT, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
BOTH = pytest.mark.parametrize(
    "kwargs", [REENTRANT, pytest.param(NON_REENTRANT, marks=pytest.mark.full)], ids=["reentrant", "non-reentrant"]
)
DROPOUT = 0.1


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(memory, "MARGIN", 4 * MIB)
    monkeypatch.setattr(memory, "SECONDS", 0)
    gc.collect()
    yield Memory(monkeypatch, 4 * GIB)
    nf4_patch.disable()
    gc.collect()
    assert not any(activations.taken.values())
    activations.taken.clear()


def model_of(kwargs=NON_REENTRANT, name="Llama", targets=("q_proj", "down_proj"), **changes):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | changes))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=list(targets), lora_dropout=DROPOUT)).train()
    model.gradient_checkpointing_enable(kwargs)
    model.enable_input_require_grads()
    return model


def layers_of(model):
    return model.get_base_model().model.layers


def batch(length=64, rows=2, seed=0):
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(model, steps=5, shape=(64, 2), each=lambda step: None, lengths=None, optimizer=None):
    """Return losses, gradients and adapters after these steps."""
    optimizer = optimizer or torch.optim.AdamW(trained(model), lr=1e-2)
    torch.manual_seed(1)
    numbers = []
    for step in range(steps) if lengths is None else range(len(lengths)):
        loss = loss_of(model, batch(*shape, step) if lengths is None else batch(lengths[step], 2, step))
        each(step)
        loss.backward()
        numbers += [loss.detach(), *(p.grad.clone() for p in trained(model))]
        optimizer.step()
        optimizer.zero_grad()
    return numbers + [p.detach().clone() for p in trained(model)] + [torch.rand(1)]


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def measured(model, option=None, ids=None):
    """Switch the option on, and run one step, in which every layer recomputes and is measured."""
    nf4_patch.enable(activations=option or GIB)
    loss_of(model, batch() if ids is None else ids).backward()
    model.zero_grad()
    counters.reset()
    return model


def status():
    return nf4_patch.status().activations


def reasons():
    return {reason.name: n for (_, reason), n in counters.fallbacks.items()}


def out():
    return sum(activations.taken.values())


# --- the same numbers ---


@pytest.mark.parametrize(("kwargs", "option"), crossed((NON_REENTRANT, REENTRANT), ("auto", "1GiB")), ids=str)
def test_losses_gradients_adapters_and_dropout_are_equal_to_the_bit(kwargs, option):
    want = train(model_of(kwargs))
    model = model_of(kwargs)
    nf4_patch.enable(activations=option)
    got = train(model)
    assert equal(got, want)
    assert (status().kept, status().layers) == (LAYERS, LAYERS) and status().size > MIB
    waiting = LAYERS * (2 if option == "auto" else 1)
    assert reasons() == {"ACTIVATIONS_WAITING": waiting} and out() == 0


@BOTH
def test_only_the_layers_that_fit_are_kept_the_first_ones(kwargs):
    want, model = train(model_of(kwargs)), measured(model_of(kwargs))
    size = max(max(record.sizes.values()) for record in activations.records.values())
    nf4_patch.enable(activations=f"{int(2.5 * size)}B")
    got = train(model)
    assert equal(got, want)
    kept = [activations.records[layer].why is None for layer in layers_of(model)]
    assert kept == [True, True, False, False]
    assert status().why == {"ACTIVATIONS_BUDGET": 2} and status().size <= 2.5 * size
    assert "2 of 4 layers kept" in str(nf4_patch.status())


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["gemma3", "mixture with a dense layer"])
def test_layers_of_different_kinds(kind):
    def model():
        if kind == "gemma3":
            torch.manual_seed(0)
            config = transformers.Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=16, sliding_window_pattern=2)
            made = get_peft_model(
                transformers.Gemma3ForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
            ).train()
            made.gradient_checkpointing_enable(NON_REENTRANT)
            made.enable_input_require_grads()
            return made
        changes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
        return model_of(name="Qwen3Moe", targets=["q_proj", "v_proj"], head_dim=32, **changes)

    want, ours = train(model()), model()
    nf4_patch.enable(activations="auto")
    assert equal(train(ours), want) and status().kept == LAYERS
    if kind != "gemma3":
        sizes = [max(activations.records[layer].sizes.values()) for layer in layers_of(ours)]
        assert sizes[1] != sizes[2]  # the dense layer holds something else


def test_every_n_layers_and_layers_that_are_not_checkpointed():
    model = model_of()
    for layer in layers_of(model)[::2]:  # as transformers' every_n_layers and Unsloth's checkpoint_skip_layers leave it
        layer.gradient_checkpointing = False
    measured(model)
    loss_of(model, batch()).backward()
    assert (status().kept, status().layers) == (2, 2)


@pytest.mark.full
def test_trainer_with_lengths_that_vary_and_accumulated_batches(tmp_path):
    rows = [{"input_ids": batch(48 - 4 * i, 1, i)[0], "labels": batch(48 - 4 * i, 1, i)[0]} for i in range(8)]

    def run():
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=1, report_to="none", learning_rate=1e-2, logging_steps=1,
            gradient_accumulation_steps=2, save_strategy="no", use_cpu=True, seed=0, gradient_checkpointing=True,
        )  # fmt: skip
        model = model_of()
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trained(model), status()

    losses, adapters, _ = run()
    nf4_patch.enable(activations="auto")
    again, ours, found = run()
    assert again == losses and equal(ours, adapters)
    assert found.kept == found.layers == LAYERS


@pytest.mark.parametrize(("kwargs", "lora"), crossed((NON_REENTRANT, REENTRANT), ("off", "fused")), ids=str)
def test_4_bit_layers(checkpoint, linear_op, kwargs, lora):
    def run(option):
        nf4_patch.enable(lora=lora, activations=option)
        torch.manual_seed(0)
        model = load_4bit(checkpoint, linear_op)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=DROPOUT)
        model = get_peft_model(model, config).train()
        model.gradient_checkpointing_enable(kwargs)
        model.enable_input_require_grads()
        return train(model, shape=(96, 2)), status()

    want, _ = run("off")
    got, found = run("auto")
    assert equal(got, want) and found.kept == found.layers > 0


@BOTH
def test_mixtures_with_packed_experts(kwargs):
    """A recompute saves the dense stack, which its backward frees at once. A kept layer saves the packed stack."""
    tiny_experts = pytest.importorskip("tiny_experts")

    def run(option):
        nf4_patch.enable(experts="4bit", activations=option)
        model = tiny_experts.model_of("qwen3", vocab_size=128, moe_intermediate_size=256, num_experts=16)
        model.gradient_checkpointing_enable(kwargs)
        model.enable_input_require_grads()
        return train(model, lengths=[96] * 5), model

    want, _ = run("off")
    got, model = run("auto")
    assert equal(got, want) and status().kept == status().layers == tiny_experts.LAYERS
    for layer in layers_of(model):
        record = activations.records[layer]
        assert record.exact == set(record.sizes)


# --- what is counted as out ---


@BOTH
def test_a_loss_that_is_thrown_away(kwargs):
    model = measured(model_of(kwargs))
    loss = loss_of(model, batch())
    assert out() == status().size > 0
    del loss
    assert out() == 0


def test_a_loss_that_is_kept_after_its_backward_holds_nothing():
    model, losses = measured(model_of()), []
    for step in range(3):
        losses.append(loss_of(model, batch(seed=step)))
        losses[-1].backward()
        assert out() == 0
    assert status().kept == LAYERS


@BOTH
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle_of_a_forward(kwargs, error):
    model = measured(model_of(kwargs))
    functions = [layer._gradient_checkpointing_func for layer in layers_of(model)]

    def raises(*_):
        raise error("in the middle")

    with contextlib.suppress(error), contextlib.ExitStack() as stack:
        stack.callback(layers_of(model)[2].mlp.register_forward_hook(raises).remove)
        loss_of(model, batch())
    assert out() == 0 and [layer._gradient_checkpointing_func for layer in layers_of(model)] == functions
    loss_of(model, batch()).backward()
    assert status().kept == LAYERS and out() == 0


@BOTH
def test_retain_graph_and_a_second_backward(kwargs):
    stock, model = model_of(kwargs), model_of(kwargs)
    gradients = []
    for each in (stock, model):
        if each is model:
            measured(model)
        torch.manual_seed(3)
        loss = loss_of(each, batch())
        size = out()
        loss.backward(retain_graph=True)
        assert out() == size
        assert (size > 0) is (each is model)
        loss.backward()
        assert out() == 0
        gradients.append([p.grad for p in trained(each)])
    assert equal(*gradients)


@BOTH
def test_a_loss_that_reads_a_hidden_state(kwargs):
    """The loss's gradient is added to the sum of those inside the next layer, in the order of the checkpoint."""
    gradients = []
    for each in (model_of(kwargs).bfloat16(), model_of(kwargs).bfloat16()):
        if gradients:
            measured(each)
        torch.manual_seed(3)
        found = each(input_ids=batch(), labels=batch(), output_hidden_states=True)
        (found.loss + sum(state.float().pow(2).mean() for state in found.hidden_states)).backward()
        gradients.append([p.grad for p in trained(each)])
    assert status().kept == LAYERS and equal(*gradients)


@BOTH
def test_two_forwards_before_their_backward(kwargs):
    """DPO runs two such forwards. Under a reentrant checkpoint, a layer that waits for its backward recomputes the next call."""
    stock, model = model_of(kwargs), model_of(kwargs)
    gradients = []
    for each in (stock, model):
        if each is model:
            measured(model)
        torch.manual_seed(3)
        losses = [loss_of(each, batch(seed=seed)) for seed in range(2)]
        if each is model:
            assert reasons() == ({"ACTIVATIONS_REENTRANT": LAYERS} if kwargs is REENTRANT else {})
            held = out()
        sum(losses).backward()
        gradients.append([p.grad for p in trained(each)])
    assert equal(*gradients)
    each_layer = sum(max(record.sizes.values()) for record in activations.records.values())
    assert held == pytest.approx((1 if kwargs is REENTRANT else 2) * each_layer, rel=0.1)


def test_the_limit_holds_over_several_forwards():
    model = measured(model_of())
    size = max(max(record.sizes.values()) for record in activations.records.values())
    nf4_patch.enable(activations=f"{int(6.5 * size)}B")
    loss_of(model, batch()).backward()  # measured again, because the size is new
    losses = [loss_of(model, batch(seed=seed)) for seed in range(3)]
    assert 5 * size < out() <= 6.5 * size and reasons()["ACTIVATIONS_BUDGET"] >= 3 * LAYERS - 8
    sum(losses).backward()
    assert out() == 0


def test_evaluation_and_forwards_without_gradients_in_between():
    model = measured(model_of())
    loss = loss_of(model, batch())
    size = out()
    with torch.no_grad():
        loss_of(model, batch(seed=1))
        loss_of(model.eval(), batch(seed=1))
    loss_of(model, batch(seed=1))  # in evaluation, transformers checkpoints nothing
    assert out() == size
    loss.backward()
    assert out() == 0 and reasons() == {}


def test_gradients_of_some_inputs():
    """autograd runs only the layers above the input, and keeps the activations of the layers below."""
    stock, model = model_of(), model_of()
    found = []
    for each in (stock, model):
        if each is model:
            measured(model)
        torch.manual_seed(3)
        loss = loss_of(each, batch())
        size = out()
        weights = [p for name, p in each.named_parameters() if "layers.2." in name and p.requires_grad]
        found.append(torch.autograd.grad(loss, weights))
        if each is model:
            assert 0.4 * size < out() < 0.6 * size  # those of layers 0 and 1
        del loss
        assert out() == 0
    assert equal(*found)


@BOTH
def test_parameters_that_are_replaced_before_the_backward(kwargs):
    """A kept layer computes the gradients of the forward that ran, as without checkpointing."""

    def gradients(model):
        given = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
        torch.manual_seed(1)
        loss = torch.func.functional_call(model, given, kwargs={"input_ids": batch(), "labels": batch()}).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(given.values()))]

    plain = model_of(kwargs)
    plain.gradient_checkpointing_disable()
    want, model = gradients(plain), measured(model_of(kwargs))
    assert equal(gradients(model), want) and status().kept == LAYERS


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kwargs", "between"),
    crossed((NON_REENTRANT, REENTRANT), (nf4_patch.disable, nf4_patch.release)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_disable_and_release_between_forward_and_backward(between, kwargs):
    def each(step):
        if step == 3:
            between()

    want, model = train(model_of(kwargs)), model_of(kwargs)
    nf4_patch.enable(activations=GIB)
    assert equal(train(model, each=each), want) and out() == 0


def test_two_models_and_the_next_model_after_del():
    first, second = measured(model_of()), measured(model_of())
    losses = [loss_of(first, batch()), loss_of(second, batch())]
    assert status().layers == 2 * LAYERS and out() == status().size
    sum(losses).backward()
    dead = weakref.ref(layers_of(first)[0])
    del first, losses
    gc.collect()
    assert dead() is None and status().layers == LAYERS
    del second
    gc.collect()
    third = measured(model_of())
    loss_of(third, batch()).backward()
    assert status().kept == status().layers == LAYERS


# --- what is refused ---


def test_hooks_on_saved_tensors_get_every_tensor_of_a_recomputed_layer():
    """With TRL's activation offloading, kept activations must not wait in host memory and count as kept."""
    model = measured(model_of())
    with save_on_cpu():
        loss = loss_of(model, batch())
    assert out() == 0 and reasons() == {"ACTIVATIONS_HOOKED": LAYERS}
    loss.backward()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        loss_of(model, batch())
    assert reasons() == {"ACTIVATIONS_HOOKED": 2 * LAYERS}
    assert status().kept == 0 and nf4_patch.status().options["activations"].refused == {
        "ACTIVATIONS_HOOKED": 2 * LAYERS
    }


def prefer(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return wrapper


calls: list[int] = []
OTHERS = {
    "selective": lambda: functools.partial(
        checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, prefer)
    ),
    "no random state": lambda: functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "debug": lambda: functools.partial(checkpoint, use_reentrant=False, debug=True),
    "a wrapper": lambda: functools.partial(wrapped(checkpoint), use_reentrant=False),
    "another function": lambda: lambda function, *args: checkpoint(function, *args, use_reentrant=False),
}


@pytest.mark.parametrize("other", thinned(OTHERS, 3))
def test_a_checkpoint_function_that_does_something_else_is_called(other):
    model = measured(model_of())
    for layer in layers_of(model):
        layer._gradient_checkpointing_func = OTHERS[other]()
    calls.clear()
    loss_of(model, batch()).backward()
    assert reasons() == {"ACTIVATIONS_CHECKPOINT": LAYERS} and out() == 0
    assert len(calls) == (LAYERS if other == "a wrapper" else 0)


@pytest.mark.parametrize(
    "more", [{"determinism_check": "none"}, {"early_stop": False}, {"preserve_rng_state": True}], ids=str
)
def test_options_of_a_checkpoint_that_change_nothing(more):
    if "early_stop" in more and torch.__version__ < (2, 9):
        pytest.skip("no such option")
    model = measured(model_of(NON_REENTRANT | more))
    loss_of(model, batch()).backward()
    assert status().kept == LAYERS


def test_a_layer_inside_another_checkpoint():
    model = measured(model_of())
    ids = batch()
    checkpoint(lambda: loss_of(model, ids), use_reentrant=False).backward()
    assert reasons()["ACTIVATIONS_HOOKED"] == LAYERS * 2 and out() == 0


class Counting(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)


def test_a_layer_that_changes_a_buffer_recomputes():
    """With a checkpoint, the buffer changes twice in each step."""
    model = model_of()
    layers_of(model)[1].mlp = Counting(layers_of(model)[1].mlp)
    measured(model)
    loss_of(model, batch()).backward()
    assert layers_of(model)[1].mlp.calls == 4
    assert status().kept == LAYERS - 1 and status().why == {"ACTIVATIONS_LAYER": 1}


def test_a_layer_whose_result_has_another_class_recomputes():
    """Nothing says when activations behind such a result are freed."""
    model = model_of()
    kind = type(layers_of(model)[1])

    class Boxing(kind):
        def forward(self, *args, **kwargs):
            return SimpleNamespace(y=super().forward(*args, **kwargs))

    class Unboxing(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **kwargs):
            return self.layer(*args, **kwargs).y

    layers_of(model)[1].__class__ = Boxing
    layers_of(model)[1] = Unboxing(layers_of(model)[1])
    measured(model)
    for _ in range(2):
        loss_of(model, batch()).backward()
    assert status().kept == LAYERS - 1 and status().why == {"ACTIVATIONS_LAYER": 1}


def test_sharded_parameters():
    model = measured(model_of())
    layers_of(model)[0]._is_fsdp_managed_module = True  # as FSDP and accelerate mark it
    next(layers_of(model)[1].parameters()).ds_id = 7  # as ZeRO-3 does
    nf4_patch.release()
    for _ in range(2):
        loss_of(model, batch()).backward()
    assert status().why == {"ACTIVATIONS_LAYER": 2}


def shared(model):
    first, *others = [layer.self_attn.q_proj.lora_A["default"] for layer in layers_of(model)]
    for other in others:
        other.weight = first.weight
    return model


@BOTH
def test_an_adapter_that_layers_share(kwargs):
    """A reentrant checkpoint adds each layer's gradient to the sum separately, which rounds differently."""
    want, model = train(shared(model_of(kwargs))), shared(model_of(kwargs))
    nf4_patch.enable(activations=GIB)
    assert equal(train(model), want)
    assert status().kept == (0 if kwargs is REENTRANT else LAYERS)


def test_a_reentrant_checkpoint_whose_input_needs_no_gradient_gives_none():
    model = measured(model_of(REENTRANT))
    model.get_input_embeddings()._forward_hooks.clear()
    loss = loss_of(model, batch())
    assert not loss.requires_grad and out() == 0
    assert reasons() == {"ACTIVATIONS_REENTRANT": LAYERS}
    for layer in layers_of(model):
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    for _ in range(2):
        loss_of(model, batch()).backward()
    assert status().kept == LAYERS


@pytest.mark.parametrize("given", [[], {}, {"keys": None}], ids=str)
@BOTH
def test_a_layer_that_may_write_into_a_list_or_dict_recomputes_under_a_reentrant_checkpoint(kwargs, given):
    model, ids = measured(model_of(kwargs)), batch()
    model(input_ids=ids, labels=ids, given=given).loss.backward()
    assert reasons() == ({"ACTIVATIONS_REENTRANT": LAYERS} if kwargs is REENTRANT else {})


def test_few_rows_round_otherwise_only_for_our_own_options():
    from nf4_patch.libraries.peft.linear import FEW_ROWS
    from nf4_patch.matmul.choice import LARGEST_M

    assert max(FEW_ROWS, LARGEST_M) <= module.FEW_ROWS
    for options, kept in (({}, LAYERS), ({"lora": "fused"}, 0), ({"matmul": "auto"}, 0)):
        nf4_patch.disable()
        nf4_patch.enable(**options)
        model = measured(model_of(REENTRANT), ids=batch(32))
        loss_of(model, batch(32)).backward()
        assert status().kept == kept


def test_a_trained_parameter_is_swapped():
    """PyTorch refuses to swap tensors with weak references. Layers that share the parameter still recompute."""
    model = measured(model_of(REENTRANT))
    layers = layers_of(model)
    adapter = layers[0].self_attn.q_proj.lora_A["default"]
    adapter.weight.grad = None
    torch.utils.swap_tensors(adapter.weight, torch.nn.Parameter(adapter.weight.detach().clone()))
    layers[1].self_attn.q_proj.lora_A["default"] = adapter
    for layer in layers[1:]:
        activations.records[layer].kind = None  # so that it is examined again
    loss_of(model, batch()).backward()
    assert [activations.records[layer].shares for layer in layers] == [True, True, False, False]


def test_a_layer_without_anything_to_train_is_not_counted():
    model = model_of()
    model.get_input_embeddings()._forward_hooks.clear()
    for p in layers_of(model)[0].parameters():
        p.requires_grad = False
    measured(model)
    loss_of(model, batch()).backward()
    assert (status().kept, status().layers) == (LAYERS - 1, LAYERS - 1)


def test_another_option_of_the_same_function_changes_nothing():
    """graphs="auto" replaces the same function. On a CPU, it runs no layer."""
    for options in ({"graphs": "auto"}, {"graphs": "auto", "activations": "off"}):
        nf4_patch.enable(**options)
        model = model_of()
        loss_of(model, batch()).backward()
        assert status().layers == 0
    nf4_patch.enable(activations=GIB)
    model = measured(model_of())
    loss_of(model, batch()).backward()
    assert (status().kept == LAYERS and reasons() == {"NOT_CUDA": LAYERS}) or "GRAPH" in str(reasons())
    nf4_patch.enable(graphs="off")
    counters.reset()
    loss_of(model, batch()).backward()
    assert reasons() == {}
    nf4_patch.disable()
    call = transformers.modeling_layers.GradientCheckpointingLayer.__call__
    assert not call.__module__.startswith("nf4_patch")


# --- the budget ---


def test_a_size_that_was_not_measured_counts_as_the_next_larger_one():
    record, kind = module.Record(), (1,)
    size = functools.partial(module.InputSize, kind=kind)
    record.measured(size(1000, 500), 1000 * MIB)
    record.measured(size(400, 100), 500 * MIB)
    assert record.estimate(size(200, 100)) == 200 * MIB  # the smaller of two bounds
    assert record.estimate(size(200, 200)) == 200 * MIB
    assert record.estimate(size(1000, 501)) is record.estimate(size(1001, 500)) is None
    assert record.estimate(module.InputSize(10, 10, (2,))) is None
    record.exact.add(size(1, 1))
    for rows in range(1, 2 * module.SIZES):
        record.measured(size(rows, 1), MIB)
    assert len(record.sizes) == module.SIZES and record.estimate(size(1000, 500)) == 1000 * MIB
    assert not record.exact  # the smallest was forgotten


def test_calls_that_graphs_replace_next_leave_the_memory_to_the_graphs():
    found, record, size = module.Activations(), module.Record(), module.InputSize(10, 10, ())
    found.budget, record.device = 100, 7
    found.add(7, 60)
    assert [found.why_no_room(record, size, 40) for _ in range(3)] == [Reason.ACTIVATIONS_WAITING] * 2 + [None]
    assert found.why_no_room(record, size, 41) is Reason.ACTIVATIONS_BUDGET
    found.add(7, -60)
    assert found.why_no_room(record, module.InputSize(10, 5, ()), 40) is None


def test_calls_of_small_sizes_are_counted_although_their_memory_is_forgotten():
    found, record, sizes = module.Activations(), module.Record(), [module.InputSize(n, n, ()) for n in range(1, 2000)]
    found.budget, record.device = 100, 7
    found.add(7, 60)
    for size in sizes[2 : module.SIZES + 2]:
        record.measured(size, 1)
    for _ in range(module.FIRST_CALLS):
        assert found.why_no_room(record, sizes[0], 1) is Reason.ACTIVATIONS_WAITING
        record.measured(sizes[0], 1)
    assert found.why_no_room(record, sizes[0], 1) is None and sizes[0] not in record.sizes
    for size in reversed(sizes):
        found.why_no_room(record, size, 1)
        record.measured(size, 1, exact=True)
        assert size in record.exact  # otherwise, it would be measured at every call
    assert max(len(record.eager), len(record.exact)) <= module.MANY and len(record.sizes) == module.SIZES


def test_calls_that_graphs_never_replace_keep_their_activations_at_once():
    found, record, size = module.Activations(), module.Record(), module.InputSize(10, 10, ())
    found.budget, record.device, found.graphs_are_full = 100, 7, lambda: True
    found.add(7, 60)
    assert found.why_no_room(record, size, 40) is None


def test_bytes_that_graphs_keep_are_added_up_by_device():
    found = module.Activations()
    for device, size in [(2, 5), (2, 3), (0, 4), (2, -8)]:
        found.add(device, size)
    assert found.taken == {2: 0, 0: 4} and found.most == {2: 8, 0: 4}


def peak_of(gpu, model, lengths):
    gc.collect()
    gpu.empty_cache()
    gpu.peak = 0
    hooks = [register_module_forward_hook(lambda *_: gpu.look() and None)]
    try:
        numbers = train(model, lengths=lengths)
    finally:
        for hook in hooks:
            hook.remove()
    return numbers, gpu.peak


RISING = [64] * 10 + [256] + [64] * 3 + [384, 128, 512, 64, 512, 512, 512, 512]


@pytest.mark.full
def test_lengths_that_rise_late_never_take_more_than_the_limit(gpu):
    """Training that fits without nf4_patch still fits. The margin is 4 MiB and 1/24 of the memory."""
    want, needed = peak_of(gpu, model_of(), RISING)
    gc.collect()
    gpu.total = needed + 40 * MIB
    nf4_patch.enable(activations="auto")
    model = model_of()
    got, peak = peak_of(gpu, model, RISING)
    assert equal(got, want) and peak <= gpu.total
    assert 0 < status().kept < LAYERS  # it uses what is left: some, and not more
    assert peak > needed + MIB


def test_an_evaluation_of_longer_sequences_than_those_of_the_training_so_far(gpu):
    """In evaluations too, peft lets the first layer's input require a gradient."""
    nf4_patch.enable(activations="auto")
    model = model_of()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    train(model, 4, optimizer=optimizer)
    with torch.no_grad():
        loss_of(model.eval(), batch(128))
    train(model.train(), 4, optimizer=optimizer)
    assert status().kept == LAYERS
    train(model, 1, (128, 2), optimizer=optimizer)
    assert status().kept == 0 and status().waits == "BATCH"


@pytest.mark.full
def test_a_long_batch_after_a_hundred_short_ones(gpu):
    nf4_patch.enable(activations="auto")
    model = model_of()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    train(model, 100, (16, 1), optimizer=optimizer)
    assert status().kept == LAYERS
    loss = loss_of(model, batch(48, 1))
    assert out() == 0 and status().why == {"ACTIVATIONS_WAITING": LAYERS}
    assert (status().waits, status().numbers) == ("BATCH", (48, 48))
    loss.backward()


class Late(torch.optim.SGD):
    """An optimizer that allocates its state at its second step."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            self.late = torch.zeros(16 * MIB // 4)
        return super().step(closure)


def test_an_optimizer_that_allocates_at_its_second_step(gpu):
    """The memory is measured after the second step, so the state counts as needed."""
    nf4_patch.enable(activations="auto")
    model, budgets = model_of(), []
    optimizer = Late(trained(model), lr=0.1)
    for seed in range(4):
        loss_of(model, batch(seed=seed)).backward()
        budgets.append(activations.budget)
        optimizer.step()
        optimizer.zero_grad()
    assert budgets[:2] == [0, 0] and budgets[2] == budgets[3] > 0
    assert spare.needed[gpu.DEVICE] > 16 * MIB


def test_a_cap_on_the_memory(gpu):
    """``set_per_process_memory_fraction`` sets such a cap."""
    nf4_patch.enable(activations="auto")
    gpu.fraction = 0.001
    train(model_of(), 4)
    assert activations.budget == 0
    gpu.fraction = 0.5
    model = model_of()
    train(model, 4)
    assert GIB < activations.budget <= gpu.total / 2 and status().kept == LAYERS


def test_another_process_that_takes_memory(gpu):
    nf4_patch.enable(activations="auto")
    model = model_of()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    train(model, 4, optimizer=optimizer)
    first = loss_of(model, batch())
    gpu.others = GIB
    loss = loss_of(model, batch())  # notices it at a layer, because memory waits for a backward
    assert activations.budget == 0 and status().waits == "OTHER_PROCESS"
    (first + loss).backward()
    train(model, 4, optimizer=optimizer)
    assert activations.budget == 0
    gpu.others = 0
    train(model, 4, optimizer=optimizer)
    assert status().kept == LAYERS


def test_memory_that_runs_short_takes_the_budget_back(gpu):
    nf4_patch.enable(activations="auto")
    model = model_of()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    train(model, 4, optimizer=optimizer)
    budget = activations.budget
    loss = loss_of(model, batch())
    held = out()
    gpu.retries = 1  # an allocation succeeded only after PyTorch had freed its unused memory
    loss_of(model, batch())
    assert activations.budget == 0 and status().waits == "MEMORY"
    assert out() == held  # what waits for its backward stays
    loss.backward()
    train(model, 4, optimizer=optimizer)
    assert 0 < activations.budget <= budget and status().kept == LAYERS


def test_activations_come_first_and_the_cache_gets_the_rest(gpu):
    nf4_patch.enable(activations="auto", cache="auto")
    model = model_of()
    train(model, 4)
    wanted = activations.wants(0)
    assert activations.user.share >= wanted > MIB and cache.budget > 0
    assert activations.user.share + cache.budget <= gpu.total
    assert activations.user.share < 1.6 * wanted
    assert activations.wants(9 * wanted) == wanted
    assert nf4_patch.status().cache.budget == cache.budget
    nf4_patch.enable(graphs="auto")  # if memory is plentiful, lengths without graphs keep their activations too
    assert [activations.wants(part * wanted) for part in (4, 6, 9)] == [wanted, 3 * wanted // 2, 2 * wanted]
    nf4_patch.enable(cache="off")
    assert [user.rank for user in spare.users] == [0]
    nf4_patch.enable(activations="off")
    assert not spare.users


def test_two_options_share_memory_before_any_training(gpu):
    nf4_patch.enable(activations="auto", cache="auto")
    assert nf4_patch.status().cache.waits == status().waits == "TRAINING"


def test_the_budget_beside_a_cache_holds_all_layers(gpu, monkeypatch):
    """All layers also fit if the checkpoint offloads inputs, and as CUDA graphs, whose backward takes the memory of one
    more layer.
    """
    monkeypatch.setattr(module, "checkpoint_of", lambda _: Checkpoint(reentrant=False, offloads=True))
    model = model_of().bfloat16()
    nf4_patch.enable(activations="auto", cache="auto")
    train(model, 4)
    assert status().kept == LAYERS
    sizes = [max(record.sizes.values()) for record in activations.records.values()]
    assert activations.budget >= sum(sizes) + max(sizes)


def test_memory_that_others_hold_gives_way_too(gpu):
    """The pool of CUDA graphs is such memory. It joins as a user that wants nothing."""
    asked = []
    user = User(2, asked.append, {}, wants=lambda rest: 0)
    nf4_patch.enable(activations="auto")
    spare.join(user)
    try:
        model = model_of()
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        train(model, 4, optimizer=optimizer)
        assert asked[-1] == 0 and activations.budget > 0 and user.share == 0
        count = len(asked)
        loss_of(model, batch(128))
        assert len(asked) == count + 2  # before a larger batch: the first layer's input is a leaf, as in an evaluation
    finally:
        spare.leave(user)


@pytest.mark.full
def test_the_next_training_starts_from_nothing(gpu):
    """After a training's optimizer is freed, the memory that this training needed does not count any more."""
    nf4_patch.enable(activations="auto")
    model = model_of()
    train(model, 4, (512, 2))
    large = spare.needed[gpu.DEVICE]
    del model
    gc.collect()
    model = model_of()
    train(model, 4, (16, 1))
    assert spare.needed[gpu.DEVICE] < large / 2 and status().kept == LAYERS


def test_what_the_cache_takes_in_a_layer_is_not_the_layers(gpu):
    other = User(1, lambda budget: None, {gpu.DEVICE: 0})
    nf4_patch.enable(activations="auto")
    spare.join(other)
    try:
        before = module.allocated(gpu.DEVICE)
        other.taken[gpu.DEVICE] = 100 * MIB
        assert module.allocated(gpu.DEVICE) == pytest.approx(before - 100 * MIB, abs=MIB)
    finally:
        spare.leave(other)


@pytest.mark.parametrize("value", ["8GiB", "auto", "off", 0, "1g"])
def test_values_of_the_option(value):
    nf4_patch.enable(activations=value)
    assert status().mode == {"8GiB": str(8 * GIB), "1g": str(GIB), 0: "off"}.get(value, value)


def test_expected_reasons_raise_nothing_in_strict_mode(monkeypatch):
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    model = measured(model_of())
    with save_on_cpu():
        loss_of(model, batch()).backward()
    assert Reason.ACTIVATIONS_HOOKED.is_expected


@pytest.mark.full
def test_unsloth(tmp_path):
    """Use PyTorch's checkpoint and Unsloth's. Unsloth's checkpoint would round an fp32 input to bf16."""
    from unsloth_releases import with_unsloth

    said = with_unsloth("2026.10.9", tmp_path, "activations_unsloth").split("\n")
    assert said[-5:-1] == [
        "unsloth torch.bfloat16 (True, True) 3 3 []",
        "unsloth torch.float32 (True, True) 0 3 ['ACTIVATIONS_CHECKPOINT']",
        "True torch.bfloat16 (False, False) 3 3 []",
        "True torch.float32 (False, False) 3 3 []",
    ]
