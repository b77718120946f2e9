"""Layers that run code of the script run eagerly under GRAPH_OWN_CODE. This file is such a script."""

from __future__ import annotations

import argparse
import contextvars
import functools
import gc
import sys
import warnings
import weakref
from functools import partial
from typing import Any

import bitsandbytes
import pytest
import test_graphed_layers as graphed
import torch
import transformers
from alternation import crossed, thinned
from packaging.version import Version
from test_graphed_layers import DEVICE, EAGER, LAYERS, SHAPE, STEPS, compared, layers_of, loss_of, model_of

from nf4_patch.graphs import fingerprint as fingerprint_module
from nf4_patch.graphs.fingerprint import Fingerprint
from nf4_patch.graphs.own_code import (
    VARIABLES,
    functions_in,
    held_by,
    hooks_on_activations,
    is_library,
    is_library_file,
)
from nf4_patch.patching.checkpoint import checkpoint_of, setting

clean = graphed.clean
NAMESPACE, TABLE, LIST = argparse.Namespace(factor=1.0), {"factor": 1.0}, [1.0]
VARIABLE = contextvars.ContextVar("factor", default=1.0)
TENSOR = torch.ones(1, dtype=torch.bfloat16, device=DEVICE)


class Other:
    factor = 1.0


class AttrDict(dict):
    """A dict that raises a KeyError if it is copied, or asked for a missing attribute."""

    __getattr__ = dict.__getitem__


SETTINGS, COUNTER, HOLDER = AttrDict(factor=1.0), {"calls": 0}, {"model": None}


def count() -> float:
    return 1.0 + COUNTER["calls"] / 8


# What a layer reads from the script, and so must neither be copied, nor compared, nor kept alive.
READERS: dict[str, Any] = {
    "AttrDict": lambda x: torch.nn.functional.silu(x) * SETTINGS.factor,
    "counter of a helper": lambda x: torch.nn.functional.silu(x) * count(),
    "model": lambda x: torch.nn.functional.silu(x) * (HOLDER["model"] is not None),
}


class Dictionary(torch.nn.Module):
    factors = {"default": 1.0}  # noqa: RUF012

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.silu(x) * self.factors["default"]


def closure(factor: float) -> Any:
    return lambda x: torch.nn.functional.silu(x) * factor


def with_default(x: Any, factor: float = 1.0) -> Any:
    return torch.nn.functional.silu(x) * factor


FORMS: dict[str, Any] = {
    "namespace": lambda x: torch.nn.functional.silu(x) * NAMESPACE.factor,
    "dict": lambda x: torch.nn.functional.silu(x) * TABLE["factor"],
    "list": lambda x: torch.nn.functional.silu(x) * LIST[0],
    "context variable": lambda x: torch.nn.functional.silu(x) * VARIABLE.get(),
    "attribute of another class": lambda x: torch.nn.functional.silu(x) * Other.factor,
    "global tensor": lambda x: torch.nn.functional.silu(x) * TENSOR,
    "dict of the class": Dictionary(),
    "default": with_default,
    "closure": closure(1.0),
    "partial": partial(with_default, factor=1.0),
    "partial of a library's function": partial(torch.nn.functional.silu, inplace=NAMESPACE),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    model = model_of()
    mlp = layers_of(model)[0].mlp
    mlp._modules.pop("act_fn")
    mlp.act_fn = FORMS[form]
    assert Fingerprint(layers_of(model)[0]).code.foreign
    assert not Fingerprint(layers_of(model)[1]).code.foreign


@pytest.mark.full
def test_a_layer_of_the_script():
    """The other layers replay, and a changed global takes effect at once."""

    def make():
        model = model_of()
        layers_of(model)[0].mlp.act_fn = Dictionary()
        return model

    def step_of(model, optimizer, step):
        Dictionary.factors["default"] = 1.0 + step
        return graphed.one_step(model, optimizer, step)

    found = compared(make, step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_OWN_CODE"} and found["replays"] == (LAYERS - 1) * (
        STEPS - EAGER
    )


def test_a_layer_of_a_library_that_warns():
    """Python writes the first warning of a module into the module's globals, which the fingerprint compares."""

    def make():
        model = model_of()
        for layer in layers_of(model):
            layer.mlp.act_fn = graphed.REMOTE.Warning()
        return model

    def step_of(model, optimizer, step):
        if step == EAGER:  # the warm-up gives the first warning
            vars(graphed.REMOTE).pop("__warningregistry__", None)
        return graphed.one_step(model, optimizer, step)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "an activation warns")
        found = compared(make, step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} and found["replays"] == LAYERS * (STEPS - EAGER)


@pytest.mark.full
@pytest.mark.parametrize("reader", thinned(READERS, 2))
def test_globals_that_a_layer_reads(reader):
    """The layer runs eagerly, and the others replay. The model is freed, although a global named it during training."""
    models = []

    def make():
        model = HOLDER["model"] = model_of()
        mlp = layers_of(model)[0].mlp
        mlp._modules.pop("act_fn")
        mlp.act_fn = READERS[reader]
        models.append(weakref.ref(model))
        return model

    def step_of(model, optimizer, step):
        COUNTER["calls"], SETTINGS["factor"] = step, 1.0 + step
        return graphed.one_step(model, optimizer, step)

    found = compared(make, step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_OWN_CODE"} and found["replays"] == (LAYERS - 1) * (
        STEPS - EAGER
    )
    HOLDER["model"] = None
    gc.collect()
    assert models[-1]() is None


def test_a_sequential_that_is_reordered():
    model = model_of()
    mlp = layers_of(model)[0].mlp
    mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Tanh())
    fingerprint = Fingerprint(layers_of(model)[0])
    assert fingerprint.holds() and not fingerprint.code.foreign
    mlp.act_fn._modules["0"] = mlp.act_fn._modules.pop("0")
    assert not fingerprint.holds()


@pytest.mark.parametrize("change", ["tensor in a dict", "tensor in a list", "keyword defaults", "shape of a state"])
def test_what_compares_as_equal(change, monkeypatch):
    """== is true for two one-element tensors of equal value, and for the old dict of keyword defaults."""
    mlp = layers_of(model_of())[0].mlp
    mlp.act_fn = graphed.REMOTE.Factors(SHAPE.intermediate_size, DEVICE)
    mlp.act_fn.tensors["default"], mlp.act_fn.lists["default"][0] = torch.ones(1), torch.ones(1)
    state = mlp.up_proj.base_layer.weight.quant_state
    fingerprint = Fingerprint(mlp)
    assert fingerprint.holds() and fingerprint.is_in_place()
    if change == "tensor in a dict":
        mlp.act_fn.tensors["default"] = torch.ones(1)
    elif change == "tensor in a list":
        mlp.act_fn.lists["default"][0] = torch.ones(1)
    elif change == "keyword defaults":
        monkeypatch.setattr(graphed.REMOTE.Factors.forward, "__kwdefaults__", {"factor": 2.0})
    else:
        state.shape = torch.Size(reversed(state.shape))
    assert not fingerprint.holds()


def test_a_write_into_a_tensor_on_the_host(monkeypatch):
    """A graph on a GPU does not read such a tensor again."""
    mlp = layers_of(model_of())[0].mlp
    mlp.act_fn = graphed.REMOTE.Factors(SHAPE.intermediate_size, DEVICE)
    mlp.act_fn.tensor = torch.ones(2)
    monkeypatch.setattr(fingerprint_module, "runs_on", lambda tensor: tensor is not mlp.act_fn.tensor)
    fingerprint = Fingerprint(mlp)
    assert fingerprint.holds()
    mlp.act_fn.tensor.mul_(2)
    assert not fingerprint.holds()


def test_lists_and_dicts_that_a_warm_up_changed_are_restored():
    mlp = layers_of(model_of())[0].mlp
    act = mlp.act_fn = graphed.REMOTE.Factors(SHAPE.intermediate_size, DEVICE)
    fingerprint, values = Fingerprint(mlp), act.lists["default"]
    values.append(2.0)
    act.lists["another"] = [3.0]
    assert not fingerprint.holds()
    fingerprint.restore()
    assert act.lists == {"default": [1.0]} and act.lists["default"] is values and fingerprint.holds()


def test_an_attribute_that_a_config_gets():
    model = model_of()
    fingerprint = Fingerprint(layers_of(model)[0])
    assert fingerprint.holds()
    model.config.something_new = 1
    assert not fingerprint.holds()


def test_code_of_libraries_and_of_scripts():
    import json

    from transformers import LlamaModel

    assert is_library(json.dumps) and is_library(LlamaModel.forward.__wrapped__) and is_library(compared) is False
    assert is_library(eval("lambda: 0", {"__name__": "__main__"})) is False
    assert is_library(graphed.REMOTE.Scaled.forward)


def test_a_function_of_the_script_that_a_library_calls_through_a_module(monkeypatch):
    """bitsandbytes calls this function as ``F.int8_vectorwise_dequant``, in a function that no ``forward`` names."""

    def mine(*arguments):
        raise NotImplementedError

    layer = layers_of(model_of())[0]
    before = Fingerprint(layer)
    assert before.holds() and not before.code.foreign
    monkeypatch.setattr(bitsandbytes.functional, "int8_vectorwise_dequant", mine)
    assert not before.holds() and "mine" in Fingerprint(layer).code.foreign


def test_what_only_pytorch_imports_is_not_searched():
    """Dynamo's module imports sympy, whose names would lead to a thousand functions. Each call of the layer would compare them."""
    layer = layers_of(model_of())[0]
    layer.mlp.forward = torch.compile(layer.mlp.forward)
    found = {function.__module__.partition(".")[0] for function in Fingerprint(layer).code.replaceable}
    assert "transformers" in found and not found & {"sympy", "mpmath", "numpy"}


def test_every_hook_on_an_activation_is_noticed():
    y, before = torch.ones(1, requires_grad=True) * 2, sys.getprofile()
    for put in (y.register_hook, y.grad_fn.register_hook, y.grad_fn.register_prehook, lambda _: y.retain_grad()):
        with hooks_on_activations() as found:
            y.exp()
            assert not found
            put(lambda *gradients: None)
        assert found and sys.getprofile() is before


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_gradient_hook_on_an_activation(reentrant):
    """A library's gradient reversal has a factor that follows a schedule."""
    kind = graphed.REMOTE.Reversed

    def make():
        model = model_of(reentrant)
        layers_of(model)[0].mlp.act_fn = kind()
        return model

    def step_of(model, optimizer, step):
        kind.factor = -1.0 / (1 + step)
        return graphed.one_step(model, optimizer, step)

    found = compared(make, step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_HOOKED"} and found["replays"] == (LAYERS - 1) * (
        STEPS - EAGER
    )


# --- parameters that layers share ---

THREE_LAYERS = graphed.config_of(SHAPE._replace(num_hidden_layers=3), torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_parameter_of_two_layers(reentrant):
    def make():
        model = model_of(reentrant, config=THREE_LAYERS)
        first, second, _ = layers_of(model)
        second.mlp.up_proj.lora_A["default"].weight = first.mlp.up_proj.lora_A["default"].weight
        return model

    found = compared(make)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_REUSED"} and found["replays"] == STEPS - EAGER


@pytest.mark.full
def test_a_layer_that_is_called_twice_before_its_backward():
    """A reentrant checkpoint adds the gradient of each call to the gradients of the step before."""

    def make():
        model = model_of(True, config=THREE_LAYERS)
        layers_of(model)[2] = layers_of(model)[0]
        return model

    def step_of(model, optimizer, step):
        return graphed.backward(*(loss_of(model, 2 * step + each) for each in range(2)))

    found = compared(make, step_of)
    assert found["replays"] and "GRAPH_REUSED" in found["reasons"]


@pytest.mark.parametrize("step", [0, EAGER])
def test_layers_that_come_to_share_a_parameter(step):
    """At the latest before the call that records the first layer, the second layer gets one of its parameters."""

    def step_of(model, optimizer, now):
        first, second, _ = layers_of(model)
        if now == step:
            second.mlp.up_proj.lora_A["default"].weight = first.mlp.up_proj.lora_A["default"].weight
        return graphed.backward(loss_of(model, now, 8)) + graphed.backward(loss_of(model, 50 + now))

    found = compared(lambda: model_of(True, config=THREE_LAYERS), step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_REUSED"} and found["replays"] == 2 * (STEPS - EAGER)


@pytest.mark.parametrize("activations", ["off", "64GiB"])
@pytest.mark.parametrize("lengths", [(16, 16), (16, 24)], ids=str)
def test_two_forwards_of_one_loss_under_a_reentrant_checkpoint(lengths, activations):
    """Each forward's gradients are added to those of an earlier batch, also if graphs of two lengths or two kinds run."""

    def step_of(model, optimizer, step):
        earlier = graphed.backward(loss_of(model, 50 + step, 8))
        return earlier + graphed.backward(sum(loss_of(model, 2 * step + k, each) for k, each in enumerate(lengths)))

    found = compared(lambda: model_of(True), step_of, activations=activations)
    assert found["replays"] and "GRAPH_REUSED" in found["reasons"]


def test_a_loss_that_is_kept_after_its_backward():
    """Its autograd graph is not freed. But no call of a layer waits for its backward."""
    kept = []

    def step_of(model, optimizer, step):
        kept.append(loss_of(model, step))
        kept[-1].backward(retain_graph=True)
        return [kept[-1].item()]

    found = compared(lambda: model_of(True), step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} and found["replays"] == LAYERS * (STEPS - EAGER)


# --- num_items_in_batch ---


def test_a_layer_that_reads_num_items_in_batch():
    code = Fingerprint(layers_of(model_of())[0]).code
    assert not code.names("num_items_in_batch") and code.names("position_embeddings")


# --- options of the checkpoint ---


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("dropout", "options"),
    crossed((0.1, 0.0), [{"preserve_rng_state": False}, {"early_stop": False}, {"determinism_check": "none"}]),
    ids=str,
)
def test_options_of_the_checkpoint(options, dropout):
    def make():
        model = model_of(lora_dropout=dropout)
        model.gradient_checkpointing_enable({"use_reentrant": False, **options})
        return model

    found = compared(make)
    drawn = dropout > 0 and "preserve_rng_state" in options
    assert found["replays"] == (0 if drawn else LAYERS * (STEPS - EAGER))
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} | ({"GRAPH_CHECKPOINT"} if drawn else set())


# Without a GPU, there is no pinned memory.
@pytest.mark.full
@pytest.mark.parametrize(
    "options", [pytest.param({"offload": True}, marks=pytest.mark.gpu), {"every_n_layers": 2}], ids=str
)
def test_options_of_transformers(options):
    if Version(transformers.__version__) < Version("5.17"):
        pytest.skip("transformers 5.17 or newer")

    def make():
        model = model_of()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
        return model

    found = compared(make)
    assert found["replays"] == (LAYERS if "offload" in options else (LAYERS + 1) // 2) * (STEPS - EAGER)


def test_the_checkpoint_of_offload():
    model = model_of()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    found = checkpoint_of(layers_of(model)[0]._gradient_checkpointing_func)
    assert found.saves_on_host and not found.reentrant


def test_a_function_behind_a_cache_of_its_results():
    assert [*functions_in(functools.lru_cache(with_default))] == [with_default]


def test_a_function_that_holds_itself():
    def function():
        return held

    held = partial(function, 2)
    assert [*held_by(held)] == [2, function]


def test_a_wrapper_that_sets_use_reentrant():
    """ms-swift wraps the checkpoint function like this."""
    checkpoint = torch.utils.checkpoint.checkpoint
    assert checkpoint_of(partial(setting(checkpoint, False), use_reentrant=True)).reentrant is False
    assert checkpoint_of(partial(setting(checkpoint, None), use_reentrant=False)).reentrant is True
    assert not checkpoint_of(partial(lambda *a, use_reentrant=None, **k: checkpoint(*a, use_reentrant=True), x=1))


def test_files_that_libraries_generate(monkeypatch, tmp_path):
    """Environment variables, too, name the folders of these files."""
    for number, variable in enumerate(VARIABLES):
        file = str(tmp_path / f"folder{number}" / "generated.py")
        assert not is_library_file(file, "generated")
        is_library_file.cache_clear()
        monkeypatch.setenv(variable, f"{tmp_path}/folder{number}/")
        assert is_library_file(file, "generated")
