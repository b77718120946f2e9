"""nf4-patch doctor --measure: the model that it builds, its turns with the patch and without, and its output."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import recorders
import torch
from bitsandbytes.nn import Linear4bit
from tiny_experts import random_model
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from verbs import output_of, report_of

import nf4_patch
from nf4_patch.patching.switch import switch
from nf4_patch.tools import cli, measure, offload, report, step
from nf4_patch.tools.measure import BEFORE, FAST, FULL, Measured
from nf4_patch.tools.report import NotAvailable, why_no_gpu

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WHOLE = Qwen3Config(**SIZES, num_hidden_layers=6, head_dim=16, vocab_size=960)
GPU = torch.cuda.is_available()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return the folder of a tiny model, and a command that measures it quickly, also on a CPU, with stand-ins for CUDA graphs."""
    if not GPU:
        recorders.install(monkeypatch)
    WHOLE.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    for name, value in (
        ("LENGTHS", (16, 32)),
        ("ROUNDS", 2),
        ("LEARNING", 2),
        ("WARM_UPS", 3),
        ("TIMED", 1),
        ("SECONDS", 1e9),
    ):
        monkeypatch.setattr(measure, name, value)
    return tmp_path / "tiny"


def test_the_command_measures_every_side(tiny, tmp_path):
    found = report_of(tmp_path, "doctor", "--measure", tiny, "--layers", 2)
    sides = [(row["tokens"], row["side"], row["rounds"]) for row in found["rows"]]
    assert sides == [(tokens, side, 2) for tokens in (16, 32) for side in (BEFORE, FULL, FAST)]
    assert found["failures"] == [] and found["exit_code"] == 0
    assert found["about"]["model"].startswith("tiny, 2 of 6 layers, ")  # the name of the folder and not its path
    for row in found["rows"]:
        (base,) = [each for each in found["rows"] if (each["tokens"], each["side"]) == (row["tokens"], BEFORE)]
        assert row["wall_ms"] > 0 and row["wall_x"] == base["wall_ms"] / row["wall_ms"]
        assert GPU or "without Liger" in found["about"]["model"]
        assert GPU or row["gpu_ms"] is row["gpu_x"] is row["gpu_busy"] is None
    said = found["output"]
    assert (
        "copy the next three lines to an issue of this project:\n| GPU | model | tokens | fast, full GPU: wall" in said
    )
    assert str(tiny) not in said.partition("A training step")[2]


def test_a_turn_has_the_options_of_its_side_and_leaves_none(tiny, monkeypatch):
    """This holds even if the patch was on before. The adapters are reset, so the last loss equals the first."""
    seen = []

    class Recorded(step.Step):
        def __call__(self):
            options = {name: switch.value(name) for name in ("lora", "graphs", "cache", "activations")}
            seen.append(options if switch.on else None)
            return super().__call__()

    monkeypatch.setattr(measure, "Step", Recorded)
    model = step.peft_model(step.shortened(WHOLE, 2))
    fast = {"lora": "fused", "graphs": "auto", "cache": "off", "activations": "off"}
    wanted = {BEFORE: None, FULL: fast, FAST: fast | {"cache": "auto", "activations": "auto"}}
    with nf4_patch.enabled():
        losses = {}
        for side, options in measure.SIDES.items():
            seen.clear()
            replays = nf4_patch.status().graphs.replays
            losses[side] = measure.turn(model, 16, options)["losses"]
            assert len(seen) >= 2 + 3 + 3 and all(each == wanted[side] for each in seen)
            assert (nf4_patch.status().graphs.replays > replays) is bool(options)
            assert switch.on and switch.value("graphs") == "off" and nf4_patch.status().graphs.layers == 0
    first, second, last = losses[BEFORE]
    assert first == last > second
    assert list(measure.disagree(16, {side: [{"losses": found}] for side, found in losses.items()})) == []


def test_the_model_has_fewer_layers_and_lora_on_all_linear_layers():
    model = step.peft_model(step.shortened(WHOLE, 3))
    config = model.config
    assert (config.num_hidden_layers, config.vocab_size, len(config.layer_types)) == (3, 480, 3)
    assert WHOLE.num_hidden_layers == 6 and WHOLE.vocab_size == 960
    packed = [module for module in model.modules() if type(module) is Linear4bit]
    assert len(packed) == 3 * 7 and all(each.weight.quant_state.nested for each in packed)
    adapters = step.trained(model)
    assert len(adapters) == 2 * 3 * 7 and {each.dtype for each in adapters} == {step.training_dtype()}
    assert {min(each.shape) for each in adapters} == {step.RANK}
    assert model.is_gradient_checkpointing


def test_by_default_the_shapes_are_those_of_llama(monkeypatch):
    asked = []
    monkeypatch.setattr(
        measure, "layers_that_fit", lambda whole, name, most: asked.append((whole, name, most)) or 1 / 0
    )
    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    with pytest.raises(ZeroDivisionError):
        output_of("doctor", "--measure")
    ((whole, name, most),) = asked
    assert (name, most, whole.hidden_size, whole.num_hidden_layers) == ("Llama-3.1-8B", 4, 4096, 32)


@pytest.mark.parametrize(("free", "layers"), [(2**40, 4), ("4", 4), ("4-", 3), ("1", 1), ("1-", 0)])
def test_as_many_layers_as_fit(free, layers, monkeypatch):
    if isinstance(free, str):
        model = offload.on_meta(step.shortened(WHOLE, int(free[0])))
        needed = 2 * sum(each.numel() for each in model.parameters()) + offload.sizes_of(model).others
        free = needed - free.endswith("-")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    if layers:
        assert offload.layers_that_fit(WHOLE, "tiny", 4) == layers
    else:
        with pytest.raises(NotAvailable, match="not even one layer of tiny fits into the"):
            offload.layers_that_fit(WHOLE, "tiny", 4)


HYBRID = {
    "qwen3_5_text": {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRID)
def test_a_model_with_convolutions_is_no_mixture(kind):
    """The weights of its convolutions are 3-D, and stay in 16 bits. The configuration of Falcon-H1 computes ``layer_types``."""
    whole = AutoConfig.for_model(kind, **SIZES, **HYBRID[kind], head_dim=16, num_hidden_layers=6, vocab_size=960)
    sizes = offload.sizes_of(offload.on_meta(whole))
    assert not sizes.is_mixture and len(sizes.layers) == 6
    assert offload.layers_that_fit(whole, "tiny", 4) == 4
    built = step.build_4bit(step.shortened(whole, 2), "cpu")
    assert [each.dim() for name, each in built.named_parameters() if "conv1d.weight" in name] == [3, 3]


def test_a_configuration_that_needs_a_padding_token():
    whole = AutoConfig.for_model("modernbert-decoder", **SIZES, num_hidden_layers=6, vocab_size=960, pad_token_id=959)
    assert offload.layers_that_fit(whole, "tiny", 4) == 4
    assert step.shortened(whole, 4).vocab_size == 640 and step.shortened(WHOLE, 2).pad_token_id is None


@pytest.mark.parametrize("kind", ["blt", "prophetnet"])
def test_a_model_that_cannot_be_shortened_is_named(kind):
    with pytest.raises(NotAvailable, match="num_hidden_layers"):
        offload.layers_that_fit(AutoConfig.for_model(kind), "tiny", 4)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"hidden_size": "x"},
        {"num_attention_heads": 0},
        {"hidden_size": -64},
        {"hidden_size": 65, "num_attention_heads": 4},
    ],
    ids=str,
)
def test_a_configuration_with_a_wrong_field_is_named(config, tmp_path):
    text = json.dumps({"model_type": "llama", **config} if config else config)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NotAvailable, match=r"can.?not (be built|read)"):
        list(offload.lines(str(tmp_path), []))


def test_a_mixture_is_refused():
    with pytest.raises(NotAvailable, match="tiny is a mixture of experts"):
        offload.layers_that_fit(random_model("qwen3").config, "tiny", 4)


def test_out_of_memory_is_said_with_fewer_layers_to_try(tiny, tmp_path, monkeypatch):
    """The figures of the shorter sequence are still printed."""
    turn = measure.turn

    def full(model, tokens, options):
        if tokens == 32 and options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return turn(model, tokens, options)

    monkeypatch.setattr(measure, "turn", full)
    found = report_of(tmp_path, "doctor", "--measure", tiny, exit_code=1)
    assert found["failures"] == [f"4 layers of {tiny}, 32 tokens: out of memory on the GPU. Try --layers 3"]
    assert [row["tokens"] for row in found["rows"]] == [16, 16, 16] and "To share" not in found["output"]


def test_there_are_no_figures_if_losses_differ(tiny, tmp_path, monkeypatch):
    turn = measure.turn

    def wrong(model, tokens, options):
        found = turn(model, tokens, options)
        return found | {"losses": [loss * (1 + (tokens == 32 and bool(options)) / 64) for loss in found["losses"]]}

    monkeypatch.setattr(measure, "turn", wrong)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    found = report_of(tmp_path, "doctor", "--measure", tiny, "--layers", 1, exit_code=1)
    assert {row["tokens"] for row in found["rows"]} == {16}
    assert [failure.partition(": losses")[0] for failure in found["failures"]] == [
        f"32 tokens, {FULL}",
        f"32 tokens, {FAST}",
    ]


def turns(walls, gpu):
    return [{"walls": [wall], "gpu": gpu, "losses": [1.0], "notes": []} for wall in walls]


ROWS = [
    *measure.rows_of(512, {BEFORE: turns((50, 55, 45), 10.0), FULL: turns((10,), 8.0), FAST: turns((8,), 5.0)}),
    *measure.rows_of(2048, {BEFORE: turns((100,), 95.0), FULL: turns((80,), 76.0), FAST: turns((50,), 47.5)}),
]
ABOUT = {
    "GPU": "a GPU (sm_89), driver 1.2",
    "model": "m",
    "processor": "a CPU",
    "releases": "torch 2.11",
    "date": "today",
}


def test_rows():
    assert ROWS[0] == {
        "tokens": 512, "side": BEFORE, "wall_ms": 50, "gpu_ms": 10.0, "wall_x": 1.0, "gpu_x": 1.0, "gpu_busy": 0.2, "wall_spread": 0.2,
        "rounds": 3,
    }  # fmt: skip
    assert (ROWS[1]["wall_x"], ROWS[1]["gpu_x"], ROWS[1]["gpu_busy"]) == (5.0, 1.25, 0.8)


def test_what_to_expect_and_to_send():
    *_, short, long, _, sent = Measured(ABOUT, ROWS).render()
    assert short == (
        "512 tokens: without the patch, the GPU works for 20% of a step, and waits for Python in the rest. "
        "Expect 5.00x in wall-clock time, or 6.25x if memory stays free."
    )
    assert long == (
        "2,048 tokens: without the patch, the GPU works for 95% of a step, so it does not wait for Python. "
        "Expect 1.25x in GPU time, or 2.00x if memory stays free."
    )
    heading, line, row = sent.splitlines()
    assert heading.count("|") == line.count("|") == row.count("|")
    assert row == (
        "| a GPU (sm_89), driver 1.2 | m | 512 / 2,048 | 5.00x / 1.25x | 1.25x / 1.25x | 6.25x / 2.00x | 2.00x / 2.00x "
        "| 50.0 / 100.0 | 20% / 95% | a CPU | torch 2.11 | today |"
    )


def test_where_to_send_it(monkeypatch):
    urls = ["Homepage, https://example.org/nf4", "Issues, https://example.org/nf4/issues"]
    monkeypatch.setattr(report.importlib.metadata, "metadata", lambda name: SimpleNamespace(get_all=lambda key: urls))
    assert report.issues() == "https://example.org/nf4/issues"
    urls.clear()
    assert report.issues() == "an issue of this project"


def test_what_did_not_help_is_named():
    effect = nf4_patch.status().options["graphs"]
    status = SimpleNamespace(
        enabled=False, options={"graphs": effect.__class__("auto", False, (), 0, {"NOT_CUDA": 9}), "lora": effect}
    )
    (line,) = measure.did_not_help(status)
    assert line.startswith('graphs="auto": 0 of 9 layer calls, because 9 x NOT_CUDA')


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--measure", "--unsloth"], 2, "--measure times peft's layers, which --unsloth would patch"),
        (["--measure", "--offload", "Qwen/Qwen3-8B"], 2, "--measure and --offload are two questions"),
        (["--offload", ""], 2, "--offload needs the name or folder of a model"),
        (["--measure", "--layers", "0"], 2, "'--layers': 0 is not in the range"),
        (["--measure", "/no/folder"], 1, "transformers cannot read the configuration of /no/folder: "),
        pytest.param(
            ["--offload", "/no/folder"],
            1,
            "transformers cannot read the configuration of /no/folder: ",
            marks=pytest.mark.full,
        ),
    ],
)
def test_errors_are_one_sentence(words, code, said, monkeypatch):
    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    assert said in output_of("doctor", *words, exit_code=code)


def test_nothing_is_measured_without_a_gpu_or_with_the_patch_forbidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = output_of("doctor", "--measure", exit_code=1)
    assert said == f"Error: {why_no_gpu()}, so nothing can be measured or compared on this machine\n"
    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    said = output_of("doctor", "--measure", exit_code=1, NF4_PATCH="0")
    assert said == "Error: NF4_PATCH=0 keeps the patch off. Unset it to measure the patch\n"


def test_benchmarks_have_no_step_of_their_own():
    from benchmarks import models, training

    assert training.peft_model is step.peft_model and issubclass(training.Step, step.Step)
    assert models.LLAMA_8B.hidden_size == 4096 and LlamaConfig(**step.LLAMA_8B).num_hidden_layers == 32
