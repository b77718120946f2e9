"""Decoder layers as CUDA graphs in architectures other than Llama, and in common ways of training.

Every case trains twice, eagerly and with graphs, with bit-identical losses, gradients, adapters and random numbers.
Layers replay, or run eagerly under a Reason that the case names.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import test_graphed_layers as graphed
import torch
import transformers
from alternation import alternating, crossed, thinned
from run_example import GLOO, run
from test_graphed_layers import DEVICE, GPU, LENGTH, SHAPE, STEPS, backward, compared, layers_of, loss_of, tokens

import nf4_patch
from benchmarks.models import LINEARS
from benchmarks.training import trained
from nf4_patch.graphs.layers import graphs

clean = graphed.clean
PROGRAM = Path(__file__).parents[1] / "programs" / "graphs_sharded.py"
LAYERS = 2
TARGETS = [*LINEARS, "qkv_proj", "gate_up_proj", "query_key_value", "dense", "fc1", "fc2"]

# --- architectures ---

WINDOW = {"sliding_window": 16}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# With sdpa, two of its trainings on an H200 may differ, also without the patch.
GEMMA4 = {**MIXED, "vocab_size_per_layer_input": 512, "attn_implementation": "eager"}
CONV = {"layer_types": ["conv", "full_attention"]}
# The config of each architecture, apart from its sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Arcee": {}, "Cohere": {}, "Cohere2": MIXED, "Doge": {}, "Exaone4": MIXED, "Gemma": {}, "Gemma2": MIXED, "Gemma3Text": MIXED,
    "Gemma4Text": GEMMA4, "Glm": {}, "Glm4": {}, "GPTNeoX": {}, "Granite": {}, "Helium": {}, "Lfm2": CONV, "Ministral": MIXED,
    "Mistral": WINDOW, "Nemotron": {}, "Olmo2": {}, "Olmo3": MIXED, "Phi": {}, "Phi3": WINDOW, "Qwen2": {}, "Qwen3": {},
    "SmolLM3": {}, "StableLm": {}, "Starcoder2": WINDOW,
}  # fmt: skip
# Gemma 4's layers get a second input with a gradient, and write keys and values into an object that later layers read.
EAGER = {"Gemma4Text": "GRAPH_ARGUMENTS"}
# CUDA's autocast runs LayerNorm and pow in fp32, and bitsandbytes returns its input's dtype: the first layer gets bf16, the next fp32.
PROMOTING = {"Arcee", "GPTNeoX", "Nemotron", "Phi", "StableLm", "Starcoder2"} if GPU else set()


def config_of(name: str) -> Any:
    kind = getattr(transformers, f"{name}Config", None) or pytest.skip(f"this transformers has no {name}")
    sizes = {**SHAPE._asdict(), "num_hidden_layers": LAYERS, "dtype": "bfloat16"}
    ids = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    head = {"head_dim": SHAPE.hidden_size // SHAPE.num_attention_heads}
    return kind(**sizes | ids | head | ARCHITECTURES[name])


def padded(model: Any, optimizer: Any, step: int) -> list[float]:
    """Give each batch another padding, so that full and sliding attention both have a mask."""
    mask = torch.ones(2, LENGTH, dtype=torch.long, device=DEVICE)
    mask[0, -(10 + step) :] = 0
    return backward(loss_of(model, step, attention_mask=mask))


MODES = {
    "plain": (False, graphed.one_step), "padded": (False, padded),
    "reentrant": (True, graphed.one_step), "reentrant, padded": (True, padded),
}  # fmt: skip


QUICK = {"Arcee", "Gemma2", "Gemma4Text", "GPTNeoX", "Phi3", "Qwen3"}


@pytest.mark.every(6)
@pytest.mark.parametrize(("mode", "name"), crossed(MODES, ARCHITECTURES, only=QUICK))
def test_architectures(name, mode):
    reentrant, step_of = MODES[mode]
    found = compared(
        lambda: graphed.model_of(reentrant, config=config_of(name), targets=TARGETS, lora_dropout=0.05), step_of
    )
    if name in EAGER:
        assert found["reasons"] == {EAGER[name]} and not found["replays"]
        return
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"}
    shapes = found["status"].graphs.shapes  # of two kinds of layers, one may have a mask and the other none
    assert shapes == 1 + (name in PROMOTING) or "layer_types" in ARCHITECTURES[name]
    assert found["replays"] == LAYERS * (STEPS - graphed.EAGER)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name",
    [name if name in ("Gemma2", "GPTNeoX") else pytest.param(name, marks=pytest.mark.full) for name in ARCHITECTURES],
)
def test_generation_with_a_static_cache(name):
    config = config_of(name)
    model = graphed.model_of(config=config, targets=TARGETS, inputs=False).eval()
    # with the prompt, more tokens than a sliding window has
    options = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    with nf4_patch.enabled():
        eager = graphed.generated(model, 12, **options)
    before = graphs.replays
    with nf4_patch.enabled(graphs="auto"):
        found = graphed.generated(model, 12, **options)
    assert torch.equal(found[0], eager[0]) and torch.equal(found[1], eager[1])
    # of eleven decode steps, one runs eagerly, and one more when a sliding window becomes full
    assert graphs.replays - before == LAYERS * (10 - ("sliding_window" in ARCHITECTURES[name]))


def of_peft(**options: Any) -> Any:
    return lambda peft: peft.LoraConfig(r=8, target_modules=list(LINEARS), task_type="CAUSAL_LM", **options)


def of_method(name: str, **options: Any) -> Any:
    return lambda peft: getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", **options)


ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
# peft's other adapters: the method and its options
METHODS = {
    "AdaLoRA": of_method("AdaLora", target_modules=list(LINEARS), init_r=6, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=9),
    "biases": of_peft(bias="lora_only", lora_bias=True), "DoRA": of_peft(use_dora=True, lora_dropout=0.1),
    "IA3": of_method("IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": of_method("LNTuning", target_modules=["input_layernorm"]),
    "modules that are saved": of_peft(modules_to_save=["input_layernorm", "lm_head"]),
    "OFT": of_method("OFT", oft_block_size=8, **ATTENTION), "RandLoRA": of_method("RandLora", r=8, **ATTENTION),
    "prompts": of_method("PromptTuning", num_virtual_tokens=8), "QALoRA": of_peft(use_qalora=True, qalora_group_size=16),
    "ranks": of_peft(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}, use_rslora=True),
    "tokens": of_peft(trainable_token_indices=[5, 6]), "VeRA": of_method("Vera", r=8, **ATTENTION),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("base", "method"), alternating(("plain", "fused"), METHODS))
def test_methods_of_peft(method, base):
    peft = pytest.importorskip("peft")

    def make() -> Any:
        model = graphed.model_of().unload()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = peft.get_peft_model(model, METHODS[method](peft))
        for parameter in trained(model):
            parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def step_of(model: Any, optimizer: Any, step: int) -> list[float]:
        losses = backward(loss_of(model, step))
        if method == "AdaLoRA":  # masks and resizes its ranks
            model.base_model.update_and_allocate(step)
        return losses

    found = compared(make, step_of, steps=9, base=graphed.BASES[base])
    if method == "DoRA" and not graphed.GPU:  # on the CPU peft puts a new weight in place at every call
        assert not found["replays"] and found["reasons"] - {"GRAPH_NEW_SHAPE"} == {"GRAPH_STATE"}
        return
    # AdaLoRA trains parameters of one element. On the CPU, a kernel gets their numbers as arguments.
    changed = {"GRAPH_CHANGED"} if method == "AdaLoRA" and not graphed.GPU else set()
    assert found["replays"] and found["reasons"] - {"GRAPH_NEW_SHAPE"} == changed


MIXTURES = ["deepseek-v3", "glm4", "gpt-oss", "mixtral", "olmoe", "qwen3-next"]


@pytest.mark.full
@pytest.mark.parametrize("name", thinned(MIXTURES, 3))
def test_mixtures(name):
    found = compared(lambda: graphed.mixture(name), graphed.step_of_mixture, base={"experts": "4bit"})
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} and found["replays"]


def test_arguments_that_layers_write():
    """Gemma 4's layers pass keys and values to later layers in a dict. In transformers 5.8, it is a plain dict."""

    def make():
        model = graphed.model_of()
        layer = layers_of(model)[0]
        layer.self_attn = graphed.REMOTE.Writing(layer.self_attn)
        return model

    def step_of(model, optimizer, step):
        written = {}
        loss = loss_of(model, step, written=written)
        assert written == {"calls": 1}
        return backward(loss)

    found = compared(make, step_of)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_STATE"} and found["replays"] == (graphed.LAYERS - 1) * (
        STEPS - graphed.EAGER
    )


@pytest.mark.full
@pytest.mark.parametrize(("base", "reentrant"), crossed(({}, {"lora": "fused"}), (False, True)), ids=str)
def test_a_result_in_another_dtype_than_the_input(base, reentrant):
    def make():
        model = graphed.model_of(reentrant, lora_dropout=0.05)
        for layer in layers_of(model):
            layer.mlp.act_fn = graphed.REMOTE.Promoting()
        return model

    dtypes = []

    def step_of(model, optimizer, step):
        handle = model.base_model.model.model.norm.register_forward_pre_hook(lambda _, x: dtypes.append(x[0].dtype))
        loss = loss_of(model, step)
        handle.remove()
        return backward(loss)

    found = compared(make, step_of, base=base)
    assert set(dtypes) == {torch.float32}
    # the first layer gets bf16, the others fp32
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} and found["replays"] == graphed.LAYERS * (STEPS - graphed.EAGER)


@pytest.mark.full
@pytest.mark.parametrize(("base", "reentrant"), crossed(({}, {"lora": "fused"}), (False, True)), ids=str)
def test_few_rows(base, reentrant):
    """The forward of a reentrant checkpoint has no gradients, so few rows are multiplied directly by the packed weight."""
    step_of = graphed.step_of_lengths(lambda step: 8)
    found = compared(lambda: graphed.model_of(reentrant, lora_dropout=0.05), step_of, base=base)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} and found["replays"] == graphed.LAYERS * (STEPS - graphed.EAGER)


# --- loss scaling, hooks, shards, Trainer ---


class Scaled:
    """Runs steps in fp16 with a GradScaler, whose first scale overflows."""

    def __call__(self, model: Any, optimizer: Any, step: int) -> list[float]:
        if step == 0:
            self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**25, growth_interval=1)
        ids = tokens(step)
        with torch.autocast(DEVICE, torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        before = self.scaler.get_scale()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < before:
            optimizer.zero_grad()  # the step that follows would read gradients that are not finite
        return [loss.item(), self.scaler.get_scale()]


@pytest.mark.full
def test_loss_scaling():
    def make():
        model = graphed.model_of(config=graphed.config_of(SHAPE, torch.float16), lora_dropout=0.05)
        for parameter in trained(model):
            parameter.data = parameter.data.float()
        return model

    found = compared(make, Scaled(), steps=12 if GPU else 8)
    scales = found["losses"][1::2]
    changes = {after > before for before, after in itertools.pairwise(scales)}
    assert changes == {True, False}  # the scale fell after steps that overflowed, and grew after the others
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} and found["replays"] == graphed.LAYERS * (
        len(scales) - graphed.EAGER
    )


@pytest.mark.full
def test_parameters_of_zero3():
    def make():
        model = graphed.model_of()
        for index, parameter in enumerate(layers_of(model)[1].parameters()):
            parameter.ds_id = index  # as DeepSpeed marks them
        return model

    found = compared(make)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE", "GRAPH_HOOKED"} and found["replays"] == (graphed.LAYERS - 1) * (
        STEPS - graphed.EAGER
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("hooked", "eager"),
    [("", 0), (" ".join(f"layers.{n}" for n in range(graphed.LAYERS)), graphed.LAYERS), ("layers.1.mlp.down_proj", 1)],
)
def test_hooks_of_accelerate(hooked, eager):
    """``device_map`` puts a hook on the model if there is one device, and on each part of the model if there are
    several devices.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def make():
        model = graphed.model_of()
        for name in hooked.split(" "):
            part = model.base_model.model.model.get_submodule(name)
            add_hook_to_module(part, AlignDevicesHook(DEVICE, io_same_device=True))
        return model

    found = compared(make)
    assert found["reasons"] == {"GRAPH_NEW_SHAPE"} | ({"GRAPH_HOOKED"} if eager else set())
    assert found["replays"] == (graphed.LAYERS - eager) * (STEPS - graphed.EAGER)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.parametrize("ways", [("fsdp2", "wrapped"), ("fsdp1", "whole1", "whole2")], ids=" ".join)
def test_fsdp(ways, tmp_path):
    printed = run([sys.executable, *GLOO, PROGRAM, *ways], tmp_path, OMP_NUM_THREADS="1")
    for way in ways:
        assert printed.count(f"{way}: equal, 0 replays, ['GRAPH_HOOKED', 'GRAPH_NEW_SHAPE']") == 2


@pytest.mark.full
def test_trainer_with_gradient_accumulation(tmp_path):
    """Batches have different numbers of labels, which Trainer passes to every layer."""
    from torch.utils.data import Dataset

    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            ids = tokens(index)[0].cpu()
            return {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < 10 + index % 50, -100, ids)}

    def train(**options):
        model = graphed.model_of(lora_dropout=0.05)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=3, logging_steps=1,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, bf16=True, use_cpu=not GPU,
            report_to=[], save_strategy="no", learning_rate=1e-3, max_grad_norm=0.5,
        )  # fmt: skip
        arguments._n_gpu = 1  # DataParallel would take the others
        before = graphs.replays
        with nf4_patch.enabled(**options):
            trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
            trainer.train()
        log = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        return log, [p.detach().clone() for p in trained(model)], graphs.replays - before

    eager, adapters, _ = train()
    log, ours, replays = train(graphs="auto")
    assert log == eager and len(log) == STEPS and all(map(torch.equal, ours, adapters))
    assert replays == graphed.LAYERS * (3 * STEPS - graphed.EAGER)
