"""Decode steps of generate() as one CUDA graph: tokens and logits are bit-identical to those without graphs.

Without a GPU, a recording repeats the operations that it saw (``Operations`` in support/recorders.py). As in a CUDA
graph, no state of Python reaches a replay.
"""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import recorders
import test_graphed_layers as graphed
import test_graphs_models as models
import torch
import transformers
from interrupts import interrupted_at_every_line
from test_graphed_layers import DEVICE, GPU, SHAPE
from torch import Tensor

import nf4_patch
from benchmarks.models import LINEARS
from nf4_patch.graphs import shapes, sliding, steps
from nf4_patch.graphs.layers import graphs
from nf4_patch.patching.counters import counters
from nf4_patch.patching.locks import Block
from nf4_patch.patching.reasons import Reason

clean = graphed.clean
STEP = "transformers.modeling_utils.PreTrainedModel.get_compiled_call"
LENGTH, WINDOW = 12, 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(autouse=True)
def frozen(clean, monkeypatch):
    graphed.record_at(3, monkeypatch)  # as a user's layers
    if not GPU:
        recorders.install(monkeypatch, recorders.Operations)


def model_of(config: Any = None, targets: Any = LINEARS) -> Any:
    torch.manual_seed(0)
    model = graphed.model_of(config=config, targets=targets, inputs=False).eval()
    model.gradient_checkpointing_disable()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return model


def generated(
    model: Any, prompt: int = 6, batch: int = 2, length: int = LENGTH, pads: int = 2, **options: Any
) -> list[Tensor]:
    """Return the tokens, and the logits of each token. The first prompt is padded on the left."""
    ids = torch.randint(3, 500, (batch, prompt), generator=torch.Generator().manual_seed(batch)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    torch.manual_seed(5)
    options = {"cache_implementation": "static", "do_sample": False, "disable_compile": True, **options}
    found = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=length, min_new_tokens=length, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return [found.sequences, torch.stack(found.logits)]


def assert_same(ours: Any, theirs: Any) -> None:
    assert all(map(torch.equal, ours, theirs))


def compared(model: Any, *calls: dict[str, Any]) -> list[int]:
    """Compare with a run without graphs. Return how many layer calls replayed in each call of generate()."""
    replays = []
    with nf4_patch.enabled():
        eager = [generated(model, **options) for options in calls]
    with nf4_patch.enabled(graphs="auto"):
        counters.reset()
        for options, expected in zip(calls, eager, strict=True):
            before = graphs.replays
            assert_same(generated(model, **options), expected)
            replays.append(graphs.replays - before)
    return replays


def refused() -> set[str]:
    return {reason.name for (target, reason) in counters.fallbacks if target == STEP}


# --- architectures ---

SLIDING = {"sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    **MOE, "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
DENSE = {name: value for name, value in LINEAR.items() if name not in MOE and not name.startswith("shared")}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": SLIDING, "Gemma2": MIXED, "Gemma3Text": MIXED, "Qwen3": {}, "Qwen3Moe": MOE, "Olmo3": MIXED,
    "GptOss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}, "Qwen3Next": LINEAR, "Qwen3_5Text": DENSE,
    "Qwen3_5MoeText": LINEAR, "Lfm2": models.CONV, "Gemma4Text": {**MIXED, "vocab_size_per_layer_input": 512},
    "Cohere2": MIXED, "Phi3": SLIDING, "Granite": {}, "Ministral": MIXED,
}  # fmt: skip


def config_for(name: str) -> Any:
    kind = getattr(transformers, f"{name}Config", None) or pytest.skip(f"this transformers has no {name}")
    sizes = {**SHAPE._asdict(), "num_hidden_layers": models.LAYERS, "dtype": "bfloat16"}
    ids = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    head = {"head_dim": SHAPE.hidden_size // SHAPE.num_attention_heads}
    return kind(**sizes | ids | head | ARCHITECTURES[name])


@pytest.mark.newest
@pytest.mark.every(8)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    """Generate past the end of a sliding window, with a prompt shorter than the window and a longer one."""
    mixture = "experts" in " ".join(ARCHITECTURES[name])
    model = model_of(config_for(name), ATTENTION if mixture else models.TARGETS)
    found = compared(model, {}, {}, {"prompt": WINDOW + 3}, {"prompt": WINDOW + 3, "do_sample": True})
    assert refused() == set()
    # of eleven steps, one is observed at first, and one more when the window becomes full; a longer prompt needs a longer cache
    full = "sliding_window" in ARCHITECTURES[name]
    assert found == [models.LAYERS * replays for replays in (10 - full, 11, 10, 11)]


# --- several calls ---


def second_adapter(model: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(2)
    model.add_adapter("second", LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if ".second." in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.set_adapter("second")


def written(model: Any) -> None:
    with torch.no_grad():
        layers_of(model)[1].self_attn.q_proj.lora_A["default"].weight.mul_(-3)


def scaled(model: Any) -> None:
    layers_of(model)[1].mlp.down_proj.scaling["default"] *= 7


def merged(model: Any) -> None:
    layers_of(model)[0].mlp.up_proj.merge()


def moved(model: Any) -> None:
    projection = layers_of(model)[1].mlp.up_proj.lora_B["default"]
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 2)


def inserted(model: Any) -> None:
    model.base_model.model.model.norm = torch.nn.Sequential(model.base_model.model.model.norm, torch.nn.Tanh())


def head(model: Any) -> None:
    model.base_model.model.lm_head.weight.data = -model.base_model.model.lm_head.weight.data


layers_of = graphed.layers_of
CHANGES: dict[str, Any] = {
    "written": written, "scaled": scaled, "second adapter": second_adapter, "merged": merged, "moved": moved,
    "disabled": lambda model: model.disable_adapter_layers(), "inserted": inserted, "training": lambda model: model.train(),
    "head": head, "released": lambda model: nf4_patch.release(), "nothing": lambda model: None,
}  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_two_calls(change):
    """The next calls equal those without graphs, and replay again."""
    function = CHANGES[change]
    results = {}
    for options in ({}, {"graphs": "auto"}):
        model = model_of()
        found = results[bool(options)] = []
        with nf4_patch.enabled(**options):
            for call in range(3):
                if call == 1:
                    function(model)
                before = graphs.replays
                found.append(generated(model, do_sample=True))
    for ours, theirs in zip(results[True], results[False], strict=True):
        assert_same(ours, theirs)
    assert (graphs.replays - before) % SHAPE.num_hidden_layers == 0
    assert graphs.replays - before == SHAPE.num_hidden_layers * (LENGTH - 1) or change == "merged"


@pytest.mark.full
def test_batches_and_lengths_that_change():
    sizes = [
        {},
        {"batch": 3},
        {"prompt": 9},
        {"length": 20},
        {"batch": 3},
        {},
        {"length": 1},
        {"length": 2},
        {"length": 3},
    ]
    found = compared(model_of(), *sizes)
    # transformers' caches never get shorter, so all of them have the length of the longest call without graphs. A larger prompt than
    # any before drops all graphs
    assert found == [SHAPE.num_hidden_layers * replays for replays in (10, 10, 10, 19, 11, 11, 0, 1, 2)]
    assert refused() == set()


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 5}, {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.3}, {"guidance_scale": 1.5}, {"prefill_chunk_size": 4}, {"num_beams": 2},
        {"max_cache_len": 64}, {"output_scores": True}, {"output_hidden_states": True}, {"output_attentions": True},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_generate(options):
    model = model_of()
    if "output_attentions" in options:
        model.set_attn_implementation("eager")
    found = compared(model, options, options)
    whole = {"num_beams", "output_hidden_states", "output_attentions"}.isdisjoint(options)
    assert (found[1] == SHAPE.num_hidden_layers * (LENGTH - 1)) == whole


def test_a_cache_of_the_user():
    """After a reset, the same cache finds its graph again."""
    model = model_of()
    results = []
    for options in ({}, {"graphs": "auto"}):
        (static_cache,) = graphed.caches_of(model, 1)
        with nf4_patch.enabled(**options):
            before = graphs.replays
            for _ in range(3):
                results.append(generated(model, past_key_values=static_cache, cache_implementation=None))
                kept = [layer.keys.clone() for layer in static_cache.layers]
                static_cache.reset()
            results.append(kept)
    for ours, theirs in zip(results[:4], results[4:], strict=True):
        assert_same(ours, theirs)
    # the first step is observed; the third prompt runs as graphs of the layers
    assert graphs.replays - before == SHAPE.num_hidden_layers * (3 * (LENGTH - 1) - 1 + 1)


@pytest.mark.full
def test_a_cache_that_is_too_short():
    from transformers import StaticCache

    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        for _ in range(2):
            static_cache = StaticCache(config=model.config, max_cache_len=10)
            with pytest.raises(ValueError, match=r"the static cache is full.*max_cache_len"):
                generated(model, past_key_values=static_cache, cache_implementation=None)
        fits = StaticCache(config=model.config, max_cache_len=6 + LENGTH - 1)
        found = generated(model, past_key_values=fits, cache_implementation=None)
    with nf4_patch.enabled():
        fits = StaticCache(config=model.config, max_cache_len=6 + LENGTH - 1)
        assert_same(found, generated(model, past_key_values=fits, cache_implementation=None))


def test_a_token_without_a_graph_takes_room_in_the_cache_too(monkeypatch):
    """The prompt has six tokens, and the third step runs eagerly, so the cache is full at the fifth."""
    model, eager = model_of(), iter([False, False, True])
    monkeypatch.setattr(steps, "is_compiling", lambda: next(eager, False))
    static_cache = transformers.StaticCache(config=model.config, max_cache_len=10)
    with nf4_patch.enabled(graphs="auto"), pytest.raises(ValueError, match=r"the static cache is full.*max_cache_len"):
        generated(model, past_key_values=static_cache, cache_implementation=None)


# --- between two tokens ---


class Acting:
    """A logits processor that calls a function at the seventh token."""

    def __init__(self, act: Any):
        self.act, self.calls = act, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 7:
            self.act()
        return scores


@pytest.mark.full
@pytest.mark.parametrize(
    "change", ["disabled", "second adapter", "training", "released", "moved everywhere", "matmul precision"]
)
def test_changes_between_two_tokens(change):
    def everywhere(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.data = parameter.data * 2

    def precision(model: Any) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction ^= True

    others = {"moved everywhere": everywhere, "matmul precision": precision}
    function = others.get(change) or CHANGES[change]
    results = []
    for options in ({}, {"graphs": "auto"}):
        model = model_of()
        with nf4_patch.enabled(**options):
            results.append(generated(model))
            results.append(generated(model, logits_processor=[Acting(partial(function, model))]))
    assert_same(results[0] + results[1], results[2] + results[3])


@pytest.mark.full
def test_a_generation_within_a_generation():
    model = model_of()

    def another(inner: list[Any], **options: Any) -> None:
        inner.append(generated(model, **options))

    results = []
    for options in ({}, {"graphs": "auto"}):
        inner: list[Any] = []
        with nf4_patch.enabled(**options):
            for _ in range(2):
                results.append(generated(model, logits_processor=[Acting(partial(another, inner, batch=3))]))
                results.append(generated(model, logits_processor=[Acting(partial(another, inner))]))
        results += inner
    for ours, theirs in zip(results[8:], results[:8], strict=True):
        assert_same(ours, theirs)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.full
def test_interrupts():
    """After Ctrl-C at any line, the next call equals that of a run without graphs."""
    model = model_of()
    with nf4_patch.enabled():
        generated(model)  # later caches are as long as this one, and the length decides the last bits of the logits
        eager = generated(model, length=4)
    functions = [
        steps.Step.__call__, steps.Step.replay, steps.Step.observe, steps.StepWork.forward, Block.entered.__wrapped__,
        steps.lengths_restored.__wrapped__, steps.compiled_call,
    ]  # fmt: skip
    reached = 0
    with nf4_patch.enabled(graphs="auto"):
        for _ in interrupted_at_every_line(lambda: generated(model, length=4), *functions, before=nf4_patch.release):
            reached += 1
            assert not graphs.stepping.on
            if reached % 10 == 0:
                assert_same(generated(model, length=4), eager)
        with pytest.raises(KeyboardInterrupt):
            generated(model, logits_processor=[Acting(interrupt)])
        before = graphs.replays
        assert_same(generated(model, length=4), eager)
        assert_same(generated(model, length=4), eager)
        assert graphs.replays - before >= SHAPE.num_hidden_layers * (2 + 3) and reached > 40


@pytest.mark.full
def test_an_error_between_two_tokens():
    def fail() -> None:
        raise ValueError("mine")

    model = model_of()
    with nf4_patch.enabled(graphs="auto"), pytest.raises(ValueError, match="mine"):
        generated(model, logits_processor=[Acting(fail)])
    compared(model, {}, {})


@pytest.mark.full
def test_two_threads():
    model = model_of()
    with nf4_patch.enabled():
        eager = [generated(model, batch=batch) for batch in (2, 3)]
    results: list[Any] = [[], []]

    def generate(index: int) -> None:
        for _ in range(3):
            results[index].append(generated(model, batch=2 + index))

    with nf4_patch.enabled(graphs="auto"):
        generated(model, batch=2)
        threads = [threading.Thread(target=generate, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in range(2):
        assert len(results[index]) == 3
        for found in results[index]:
            assert_same(found, eager[index])


# --- what cannot be one graph ---


def hook(model: Any) -> None:
    model.base_model.model.lm_head.register_forward_hook(lambda module, inputs, result: result * 2)


class Mine(torch.nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


def own_code(model: Any) -> None:
    model.base_model.model.model.norm = torch.nn.Sequential(model.base_model.model.model.norm, Mine())


def elsewhere(model: Any) -> None:
    model.base_model.model.lm_head.register_buffer("elsewhere", torch.zeros(2, device="meta"))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("change", "reason"),
    [(hook, "GRAPH_HOOKED"), (own_code, "GRAPH_OWN_CODE"), (elsewhere, "GRAPH_ARGUMENTS")],
)
def test_models_that_cannot_be_one_graph(change, reason):
    """The layers of these models run as separate graphs. Each call counts once."""
    model = model_of()
    change(model)
    found = compared(model, {}, {})
    assert refused() == {reason} and counters.fallbacks[STEP, Reason[reason]] == 2
    assert found == [SHAPE.num_hidden_layers * (LENGTH - 3)] * 2


@pytest.mark.full
def test_a_hook_that_only_requires_a_gradient():
    model = model_of()
    model.enable_input_require_grads()
    assert compared(model, {}, {})[1] == SHAPE.num_hidden_layers * (LENGTH - 1)


def test_the_forward_that_trl_puts_in_place():
    """GRPOTrainer replaces the model's forward by a closure that holds the model's config."""
    trl = pytest.importorskip("trl.trainer.utils")
    if not hasattr(trl, "add_fused_lm_head"):
        pytest.skip("this TRL leaves the forward as it is")
    model = model_of()
    trl.add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
    assert compared(model, {}, {})[1] == SHAPE.num_hidden_layers * (LENGTH - 1) and not refused()
    with nf4_patch.enabled(graphs="auto"):
        generated(model)
        assert graphs.recordings
        reference = weakref.ref(model.get_base_model())
        del model
        gc.collect()
        assert reference() is None


def test_a_forward_that_holds_another_config():
    model = model_of()
    inner = model.get_base_model()
    trl = pytest.importorskip("trl.trainer.utils")
    config, inner.config = inner.config, config_for("Llama")
    trl.add_fused_lm_head(inner)
    inner.config = config
    compared(model, {}, {})
    assert refused() == {"GRAPH_OWN_CODE"}


def test_a_model_that_transformers_compiles():
    class Config:
        disable_compile = True
        compile_config = None

    model = model_of().base_model.model
    (static_cache,) = graphed.caches_of(model, 1)
    with nf4_patch.enabled(graphs="auto"):
        assert model._valid_auto_compile_criteria({"past_key_values": static_cache}, Config())
        assert type(model.get_compiled_call(None)) is steps.Step
        assert type(model.get_compiled_call(None)) is not steps.Step
        assert not model._valid_auto_compile_criteria({"past_key_values": transformers.DynamicCache()}, Config())
        assert type(model.get_compiled_call(None)) is not steps.Step


def test_the_librarys_own_compilation_comes_first():
    assert steps.valid_auto_compile_criteria(lambda *given: True, None, {}, None) is True


# --- memory ---


@pytest.mark.full
def test_nothing_is_kept_alive():
    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        found = model.generate(
            graphed.tokens(0, 6),
            max_new_tokens=5,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=True,
            return_dict_in_generate=True,
        )
        static = weakref.ref(found.past_key_values.layers[0].keys)
        weight = weakref.ref(layers_of(model)[0].mlp.up_proj.base_layer.weight)
        assert graphs.recordings
        del found
        gc.collect()
        assert GPU is False or static() is None  # the stand-in keeps what it recorded
        graphs.drop()
        gc.collect()
        assert static() is None
        generated(model)
        del model
        gc.collect()
        assert weight() is None
        generated(model_of())  # forgets the graphs of the model that was freed
        assert len(graphs.recordings) == 1


@pytest.mark.parametrize("batch", [2, 4])
def test_a_model_without_its_adapter(batch):
    """After merge_and_unload(), the first call frees the old weights that recordings of other shapes and of training hold."""
    model = model_of()
    inner = model.get_base_model()
    with nf4_patch.enabled(graphs="auto"):
        model.gradient_checkpointing_enable()
        model.train().enable_input_require_grads()
        for step in range(shapes.RECORDED_AT):
            graphed.loss_of(model, step, 24, use_cache=False).backward()
        model.gradient_checkpointing_disable()
        for rows in (2, 3):
            generated(model.eval(), batch=rows, length=4)
        layers = layers_of(model)
        assert sum(layers[0] in found for found in graphs.recordings.values()) == 1 and len(graphs.recordings) == 3
        old = [weakref.ref(layers[0].mlp.up_proj), weakref.ref(layers[1].mlp.up_proj.base_layer.weight)]
        model.disable_input_require_grads()
        model.merge_and_unload()
        del model, layers
        generated(inner.eval(), batch=batch, length=4)
        gc.collect()
        assert [reference() for reference in old] == [None, None]


@pytest.mark.full
def test_many_shapes(monkeypatch):
    """With sixteen recordings, a new one replaces the oldest."""
    monkeypatch.setattr(shapes, "SHAPES", 2)
    model = model_of()
    found = compared(model, *[{"batch": batch, "length": 5} for batch in (4, 3, 2, 2, 4)])
    assert found == [SHAPE.num_hidden_layers * replays for replays in (3, 3, 3, 4, 3)]


@pytest.mark.every(2)
@pytest.mark.parametrize("recorder", [recorders.Operations, recorders.Rerun])
def test_dropout_in_training_mode(recorder, monkeypatch):
    if not GPU:
        recorders.install(monkeypatch, recorder)
    model = model_of()
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.1)
    compared(model.train(), {"do_sample": True}, {"do_sample": True})


def test_no_memory(monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(steps.GraphedStep, "record", refuse)
    compared(model_of(), {}, {})
    assert refused() == {"GRAPH_MEMORY"}


@pytest.mark.full
def test_autocast_and_inference_mode():
    model = model_of()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert compared(model, {}, {})[1] == SHAPE.num_hidden_layers * (LENGTH - 1)
    with torch.inference_mode():
        compared(model, {}, {})


def test_the_librarys_full_window():
    """Another release of transformers may behave differently. Full windows then stay eager."""
    from transformers.cache_utils import StaticSlidingWindowLayer

    class Other(StaticSlidingWindowLayer):
        def update(self, *arguments: Any, **options: Any) -> Any:
            keys, values = super().update(*arguments, **options)
            return keys, values * 2

    assert sliding.rolls_alike(StaticSlidingWindowLayer) and not sliding.rolls_alike(Other)
    assert not sliding.rolls_alike(dict)
