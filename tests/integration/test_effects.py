"""The warnings of status(), the log and NF4_PATCH_STRICT=1 about an option that does nothing, and about slow or wrong settings."""

from __future__ import annotations

import logging

import pytest
import torch
from subprocess_python import python

import nf4_patch
from benchmarks.models import LINEARS, Shape, build_4bit, config_of
from nf4_patch.graphs import calls
from nf4_patch.graphs import layers as graphs_module
from nf4_patch.nf4 import runtime
from nf4_patch.options import OPTIONS
from nf4_patch.patching import counters, effects
from nf4_patch.patching.config import Config
from nf4_patch.patching.effects import Effect
from nf4_patch.patching.reasons import EXPECTED, NOT_MEANT, TEMPORARY, Reason

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 4
SHAPE = Shape(256, 512, LAYERS, 4, 2) if DEVICE == "cuda" else Shape(64, 128, LAYERS, 2, 1)
IDS = torch.arange(3, 147, device=DEVICE).reshape(2, 72)


@pytest.fixture
def said(caplog, monkeypatch):
    """Return the warnings so far. Earlier warnings may be repeated, and this machine counts as one with a GPU."""
    counters.warn_once.cache_clear()
    monkeypatch.setattr(effects, "_said", set())
    monkeypatch.setattr(runtime, "runs_on", lambda tensor: True)
    caplog.set_level(logging.WARNING, "nf4_patch")
    return lambda: [record.getMessage() for record in caplog.records]


def model_of(config=None, **lora):
    """Return a QLoRA model after prepare_model_for_kbit_training, which casts norms to fp32."""
    model = build_4bit(config or config_of(SHAPE, torch.bfloat16), DEVICE)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=list(LINEARS), task_type="CAUSAL_LM", **lora)
    ).train()


def step(model):
    model(input_ids=IDS, labels=IDS).loss.backward()


def test_options_that_do_nothing_are_named(said):
    """With prepare_model_for_kbit_training, but without autocast and checkpointing, every layer call is refused."""
    nf4_patch.enable(lora="fused", graphs="auto")
    step(model_of())
    options, text = nf4_patch.status().options, str(nf4_patch.status())
    assert options["lora"] == Effect("fused", True, refused={"LORA_DTYPES": 7 * LAYERS})
    assert options["graphs"] == Effect("auto", True, refused={"GRAPH_NOT_CHECKPOINTED": LAYERS})
    assert f'\n  lora="fused": 0 of {7 * LAYERS} layer calls, because {7 * LAYERS} x LORA_DTYPES: ' in text
    assert " -> train under autocast" in text and " -> train with gradient_checkpointing=True" in text
    assert f'\n  graphs="auto": 0 of {LAYERS} layer calls, because {LAYERS} x GRAPH_NOT_CHECKPOINTED: ' in text
    assert len(text.split("\n")) <= 8 and " 0 fell back\n" in text
    for _ in range(2):  # as at the end of the process
        for name in OPTIONS:
            effects.say(name)
    assert [line.partition(" layer calls")[0] for line in said() if "layer calls" in line] == [
        f'nf4_patch: lora="fused": 0 of {7 * LAYERS}', f'nf4_patch: graphs="auto": 0 of {LAYERS}'
    ]  # fmt: skip


def test_the_log_says_it_during_the_training_and_once(said):
    nf4_patch.enable("fast")
    model = model_of()
    for _ in range(8):
        step(model)
    (line,) = [line for line in said() if 'lora="fused"' in line]
    assert line.startswith(f'nf4_patch: lora="fused": 0 of {effects.SOON} layer calls, because ')


@pytest.mark.parametrize(
    ("options", "why"), [({"lora": "fused"}, "LORA_DTYPES"), ({"graphs": True}, "GRAPH_NOT_CHECKPOINTED")]
)
def test_strict_raises_for_an_option_that_was_typed(options, why, said, monkeypatch):
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    model = model_of()
    with (
        nf4_patch.enabled(**options),
        pytest.raises(nf4_patch.FallbackError, match=f"0 of 1 layer calls, because 1 x {why}"),
    ):
        step(model)
    with nf4_patch.enabled("fast", matmul=False):  # whose matmul would look for a GPU
        step(model)
    with nf4_patch.enabled(**options), torch.no_grad(), model.disable_adapter():
        model(input_ids=IDS)  # an evaluation, and a reference model without its adapter


def test_strict_does_not_raise_once_the_option_worked(said, monkeypatch):
    """Generate outside autocast, after training in which every call was fused."""
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    model = model_of()
    with nf4_patch.enabled(lora="fused"):
        with torch.autocast(DEVICE, torch.bfloat16):
            step(model)
        with torch.no_grad():
            model(input_ids=IDS)
        effect = nf4_patch.status().options["lora"]
    assert effect.used == effect.refused["LORA_DTYPES"] == 7 * LAYERS


def test_every_reason_of_an_option_is_of_one_kind():
    assert not NOT_MEANT & TEMPORARY and EXPECTED >= NOT_MEANT | TEMPORARY
    assert "pad_to_multiple_of=64" in Reason.GRAPH_NEW_SHAPE.advice


def test_an_option_that_mostly_works_is_not_logged(said):
    few = Effect("auto", True, used=96, refused={"GRAPH_NEW_SHAPE": 4})
    assert (
        not few.helps_little
        and effects.line("graphs", few) == 'graphs="auto": 96 of 100 layer calls (4 x GRAPH_NEW_SHAPE)'
    )
    many = Effect("auto", False, used=2, refused={"GRAPH_NEW_SHAPE": 10})
    assert many.helps_little and effects.line("graphs", many).endswith(
        "-> give batches few lengths, with pad_to_multiple_of=64"
    )
    assert not Effect("auto", False, refused={"NOT_FASTER": 84}).helps_little  # the profile's matmul="auto" in training


# The profile.


def test_the_profile_is_a_table():
    fast = {
        "lora": "fused", "graphs": "auto", "matmul": "auto", "cache": "auto", "activations": "auto", "merge": "reversible"
    }  # fmt: skip
    wanted = {name: fast.get(name, "off") for name in OPTIONS}
    assert Config.read({}, None, "fast").options == Config.read({"NF4_PATCH": "fast"}).options == wanted
    assert {option.name for option in OPTIONS.values() if option.fast} == {OPTIONS[name].name for name in fast}


def test_what_was_typed_goes_before_the_profile():
    typed = Config.read({}, None, None, cache="6GiB", lora=False)
    options = Config.read({}, typed, "fast", graphs=False).options
    assert (
        options["cache"] == 6 * 2**30 and options["lora"] == options["graphs"] == "off" and options["matmul"] == "auto"
    )
    assert Config.read({"NF4_PATCH": "fast", "NF4_PATCH_CACHE": "off"}).options["cache"] == "off"
    assert Config.read({}, None, None, lora=True, graphs=True, matmul=True, experts=True).options == {
        "lora": "fused", "graphs": "auto", "matmul": "auto", "experts": "4bit", "cache": "off", "offload": "off",
        "activations": "off", "merge": "off",
    }  # fmt: skip


def test_enable_auto_says_what_to_type():
    with pytest.raises(
        nf4_patch.ConfigError, match=r'enable\("fast"\), .*enable\(matmul="auto"\).*enable\(graphs="auto"\)'
    ):
        nf4_patch.enable("auto")
    with pytest.raises(TypeError):
        nf4_patch.enable("fast", "auto")
    assert not nf4_patch.is_enabled()


def test_a_profile_leaves_out_what_cannot_be_had_and_a_typed_option_raises(monkeypatch):
    from nf4_patch.patching import option

    monkeypatch.setattr(option, "release_of", lambda name: "0.16.0" if name == "peft" else "99")
    nf4_patch.enable("fast")
    status = nf4_patch.status()
    assert status.options["lora"].value == "off" and status.options["lora"].lacks == ("peft >= 0.17",)
    assert '\n  lora="fused": off, because it needs peft >= 0.17, which is not installed' in str(status)
    nf4_patch.enable(cache="off")
    assert nf4_patch.status().options["lora"] == status.options["lora"]
    nf4_patch.disable()
    with pytest.raises(nf4_patch.ConfigError, match=r"lora='fused' needs peft >= 0.17"):
        nf4_patch.enable(lora="fused")


def test_the_profile_captures_no_graphs_on_a_t4(monkeypatch):
    monkeypatch.setattr(runtime, "capability_of", lambda device: (7, 5))
    for options, slow in ((("fast",), True), (("fast", "auto"), False)):
        with nf4_patch.enabled(options[0], graphs=options[1] if options[1:] else None):
            assert graphs_module.is_slow(0) is slow
    monkeypatch.setattr(runtime, "capability_of", lambda device: (8, 0))
    with nf4_patch.enabled("fast"):
        assert not graphs_module.is_slow(0)


@pytest.mark.full
def test_the_environment_turns_the_profile_on():
    code = "import bitsandbytes, nf4_patch as n; print(n.status().options['lora'].value, n.is_enabled())"
    done = python(f"import nf4_patch; {code}", NF4_PATCH="fast")
    assert done.stdout == "fused True\n" and "is on: NF4_PATCH=fast" in done.stderr


# Warnings of settings with which the libraries themselves are slow or wrong.


def test_generation_in_training_mode_with_checkpointing(said):
    """Older releases of transformers drop the cache, so each new token sees only itself."""
    model = build_4bit(config_of(SHAPE, torch.bfloat16), DEVICE)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    with nf4_patch.enabled(graphs="auto"):
        right = model.eval().generate(IDS[:, :9], **options)
        assert not [line for line in said() if "wrong tokens" in line]
        wrong = model.train().generate(IDS[:, :9], **options)
        model.generate(IDS[:, :9], **options)
    is_wrong = not torch.equal(right, wrong)
    assert is_wrong == ("__init_subclass__" not in vars(transformers.modeling_layers.GradientCheckpointingLayer))
    assert [line for line in said() if "wrong tokens" in line] == [calls.WRONG_TOKENS] * is_wrong


def gemma(reentrant):
    from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        global_head_dim=32, vocab_size=512, vocab_size_per_layer_input=512, hidden_size_per_layer_input=16,
        num_kv_shared_layers=2, layer_types=kinds, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    model = Gemma4ForCausalLM(config).to(DEVICE).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def test_a_reentrant_checkpoint_over_layers_that_share_keys_and_values(said):
    pytest.importorskip("transformers.models.gemma4")
    gradients = []
    with nf4_patch.enabled(graphs="auto"):
        for reentrant in (False, True):
            model = gemma(reentrant)
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            gradients.append(model.model.layers[1].self_attn.k_proj.weight.grad)
            found = [line for line in said() if "wrong gradients" in line]
            assert found == [calls.WRONG_GRADIENTS] * reentrant
    right, wrong = gradients
    assert wrong is None or not torch.allclose(right, wrong, rtol=0.1)
