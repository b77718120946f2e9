"""Every small example runs on the CPU and hits the kernel, and what it learns is bit-identical.

Unsloth's script needs a GPU from its second statement onwards, because from_pretrained reads the device's properties.
Here it is only compared with the same script without the patch. gpu/test_example_runs.py trains with it.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import runpy
import sys

import peft
import pytest
import safetensors.torch
import torch
import transformers
from run_example import (
    EXAMPLES,
    GLOO,
    TORCHRUN,
    fallbacks,
    hits,
    on_and_off,
    run,
    run_example,
    same_training,
)
from subprocess_python import python

from examples import offline

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has tests of its own")
LINEARS = 14  # two layers of seven
SUPPORT = EXAMPLES.parent / "tests" / "support"
PROGRAMS = EXAMPLES.parent / "tests" / "programs"
TRAINING, WORKERS = PROGRAMS / "training.py", PROGRAMS / "workers_of_a_loader.py"
BY_RUN = ("-m", "nf4_patch", "run")
# Of the tiny Llama on two processes: each holds half of all bytes, the packed ones among them.
DENSE = 2 * 512 * 128 * 2 + 5 * 128 * 2  # embedding, head, norms: bf16
PACKED = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256) // 2
ADAPTERS = 2 * 16 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256)) * 2
SHARDED_BYTES = (DENSE + PACKED + ADAPTERS) // 2


@pytest.mark.full
def test_peft(tmp_path):
    plot = tmp_path / "loss.png"
    on, off = on_and_off("qlora_peft.py", "--same-bits", "--steps", 3, "--tokens", 64, "--plot", plot, folder=tmp_path)
    # On the CPU bitsandbytes dequantizes for the backward alone through the function that is replaced.
    assert hits(on) == 3 * LINEARS and hits(off) == 0 and not fallbacks(on)
    assert on["losses"][-1] < on["losses"][0]
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_demo(tmp_path):
    """Run the demo as scripts/demo does. Environment variables do not change the demo's switches."""
    command = [sys.executable, EXAMPLES / "demo.py", "--steps", 2, "--png", "demo.png"]
    output = run(command, tmp_path, NF4_PATCH="0", NF4_PATCH_MATMUL="auto")
    assert output.rstrip().endswith("Passed: the same losses and adapter, to the bit.")
    assert output.count("the same bits") == 2 and "the it/s say nothing about speed" in output
    # on the CPU bitsandbytes dequantizes in the backward only
    assert f"dequantize_4bit: {2 * LINEARS} calls in the kernel, fallbacks: none" in output
    assert " ms " not in output and (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"


def trained(losses=(2.0, 1.0), adapter="0a", hits=6, **fallbacks):
    return {"losses": losses, "adapter": adapter, "nf4_patch": {"targets": [{"hits": hits, "fallbacks": fallbacks}]}}


@pytest.mark.parametrize(
    ("on", "problems"),
    [
        ([trained()], []),
        ([trained((2.0, 1.0000000000000002))], ["losses or adapter differ"]),
        ([trained(adapter="0b")], ["losses or adapter differ"]),
        ([trained(hits=0)], ["the kernel never ran"]),
        ([trained(NOT_CUDA=3)], ["calls fell back to the original"]),
        ([trained(), trained(adapter="0b")],
         ["with the patch the training gives other bits when it is repeated", "losses or adapter differ"]),
    ],
)  # fmt: skip
def test_what_the_demo_calls_a_failure(on, problems):
    assert runpy.run_path(str(EXAMPLES / "demo.py"))["problems"]([trained(hits=0)], on) == problems


@pytest.mark.full
@pytest.mark.parametrize("model", ["random-qwen", "random-gemma"])
def test_peft_on_other_architectures(model, tmp_path):
    on, _ = on_and_off("qlora_peft.py", "--same-bits", "--model", model, "--steps", 1, "--tokens", 32, folder=tmp_path)
    assert hits(on) == LINEARS and not fallbacks(on)


# 12 tensors in 8 bits, with two maps of 256 values and two scales for every 256; 4 are too small for that
IN_8_BITS = 12 * (8192 + 2048 + 128) + 4 * 8 * 2048


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "options", "trained", "state"),
    [
        ("random-qwen-moe", ("--liger-loss", "--rank", 8), 2 * 8 * 8 * (128 + 256 + 128 + 128), None),
        ("random-qwen-moe", ("--attention-only", "--adamw-8bit", "--rank", 32), 0, IN_8_BITS),
        ("random-gpt-oss", ("--checkpointing", "--rank", 8), 2 * 8 * 8 * (128 + 512 + 256 + 128), None),
    ],
)
def test_mixture_of_experts(model, options, trained, state, tmp_path):
    """Run the script. ``trained`` counts the parameters of LoRA on experts.

    ``state`` counts the optimizer's bytes, by default two bf16 values per parameter.
    """
    arguments = ("--model", model, "--steps", 2, "--tokens", 32, *options, "--out", "adapter")
    on = run_example("qlora_moe.py", *arguments, folder=tmp_path)
    assert hits(on) > 2 * 8  # a step: two stacks a layer, in the forward and in the backward
    assert not [name for name in fallbacks(on) if not name.startswith(("GRAPH_", "ACTIVATIONS_"))]  # a CPU has neither
    assert on["losses"][-1] < on["losses"][0]
    trained += 2 * options[-1] * (2 * (128 + 128) + 2 * (128 + 64))  # the attention's
    file = safetensors.torch.load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert on["bytes"]["adapters"] == 2 * trained == sum(tensor.nbytes for tensor in file.values())
    assert on["bytes"]["optimizer"] == pytest.approx(state or 4 * trained, rel=0.01)


def test_what_a_mixture_takes_as_its_example_says():
    """Check the GB of Qwen3-30B-A3B: packed with nested scales, with adapters and gradients in bf16, and AdamW's state
    in bf16 or in 8 bits.
    """
    byte, stacks = 1 / 2 + 1 / 64 + 4 / 64 / 256, ((2048, 2 * 768), (768, 2048))
    attention = ((2048, 4096), (2048, 512), (2048, 512), (4096, 2048))
    packed = 48 * (math.fsum(map(math.prod, attention)) + 128 * math.fsum(map(math.prod, stacks)))
    found = re.findall(r"Qwen3-30B-A3B (.*?) +# (\d+) \+ ([\d.]+):", (EXAMPLES / "qlora_moe.py").read_text())
    assert len(found) == 3
    for options, weights, rest in found:
        rank = int(options.partition("--rank ")[2].partition(" ")[0] or 16)
        experts = 0 if "--attention-only" in options else 128 * sum(map(sum, stacks))
        trained = 48 * rank * (sum(map(sum, attention)) + experts)
        assert weights == f"{(byte * packed + 2 * 2 * 151936 * 2048) / 1e9:.0f}"
        assert rest == f"{(2 + 2 + (2 if '--adamw-8bit' in options else 4)) * trained / 1e9:.1f}"


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("qlora_trl.py", "profile, offload=args.offload"),
        ("qlora_unsloth.py", "profile"),
        ("grpo_trl.py", "profile"),
    ],
)
def test_the_patch_is_one_line(script, option):
    lines = (EXAMPLES / script).read_text().splitlines()
    with_patch = [line for line in lines if "nf4_patch" in line and not line.lstrip().startswith("#")]
    assert [line.split("#")[0].strip() for line in with_patch] == [f"import nf4_patch; nf4_patch.enable({option})"]
    ast.parse("\n".join(line for line in lines if line not in with_patch))


@pytest.mark.full
@pytest.mark.parametrize("script", ["qlora_trl.py", "qlora_peft.py"])
def test_lora_in_one_function(script, tmp_path):
    """Train as TRL does, and after prepare_model_for_kbit_training, with an environment variable alone.

    Losses equal peft's within the noise of bf16, and no call is refused.
    """
    arguments = ("--steps", 4, "--rows", 1, "--tokens", 160, *["--same-bits"] * (script == "qlora_peft.py"))
    off = run_example(script, *arguments, folder=tmp_path, patch=False)
    on = run_example(script, *arguments, folder=tmp_path, NF4_PATCH_LORA="fused")
    (row,) = (row for row in on["nf4_patch"]["targets"] if row["name"] == "peft.tuners.lora.bnb.Linear4bit.forward")
    assert row["hits"] >= 4 * 2 * LINEARS and not row["fallbacks"]
    assert on["losses"] == pytest.approx(off["losses"], rel=2**-11) and on["adapter"] != off["adapter"]


@pytest.mark.full
def test_trl_by_the_recipe(tmp_path):
    """Use the switches of docs/recipes.md except Liger, whose kernels need a GPU.

    Losses equal those of the plain run within the noise of bf16.
    """
    arguments = ("--steps", 3, "--rows", 1, "--tokens", 64)
    plain, recipe = (run_example("qlora_trl.py", *arguments, *more, folder=tmp_path) for more in ((), ("--recipe",)))
    assert recipe["losses"] == pytest.approx(plain["losses"], rel=2**-10)
    (row,) = (row for row in recipe["nf4_patch"]["targets"] if row["name"] == "peft.tuners.lora.bnb.Linear4bit.forward")
    assert row["hits"] >= 3 * 2 * LINEARS and not row["fallbacks"]
    assert recipe["nf4_patch"]["graphs"]["mode"] == recipe["nf4_patch"]["cache"]["mode"] == "auto"


def test_the_recipe_is_that_of_its_page():
    """The example has every option and argument of the first code block of docs/recipes.md."""
    block = (EXAMPLES.parent / "docs" / "recipes.md").read_text().split("```python\n")[1].split("```")[0]
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    script = (EXAMPLES / "qlora_trl.py").read_text()
    words = [(word.arg, ast.literal_eval(word.value)) for call in calls for word in call.keywords]
    assert words
    for name, value in words:
        literal = str(value) if not isinstance(value, str) else f'"{value}"'
        assert f'"{name}": {literal}' in script or f"{name}={literal}" in script, name


@pytest.mark.full
def test_trl_with_the_callback_and_its_twin(tmp_path):
    """Use ReportCallback in a real Trainer: the log history has the hits, and the report is on stdout and in JSON.

    The same script without the lines that name nf4_patch gives the same bits.
    """
    lines = (EXAMPLES / "qlora_trl.py").read_text()
    twin, script = tmp_path / "twin.py", tmp_path / "trained.py"
    twin.write_text("".join(line for line in lines.splitlines(keepends=True) if "nf4_patch" not in line))
    for before, after in (
        ("from record import Record", "from record import Record\nfrom nf4_patch.callback import *"),
        ("callbacks=[record]", "callbacks=[record, ReportCallback('report.json')]"),
    ):
        assert before in lines
        lines = lines.replace(before, after)
    lines += "\nprint('counted', [entry.get('nf4_patch_hits') for entry in trainer.state.log_history])\n"
    script.write_text(lines)
    arguments = ("--steps", 2, "--rows", 1, "--tokens", 32)
    on, off = (run_example(file, *arguments, folder=tmp_path, PYTHONPATH=str(EXAMPLES)) for file in (script, twin))
    assert not off["nf4_patch"]["enabled"] and hits(off) == 0  # imported by bitsandbytes' entry point, and idle
    assert hits(on) == 2 * LINEARS and not fallbacks(on)
    assert same_training(on, off)
    assert f"counted [{LINEARS}, {2 * LINEARS}," in on["output"]
    assert f"nf4_patch is on: {2 * LINEARS} dequantizations in the kernel, 0 fell back" in on["output"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["enabled"] and sum(target["hits"] for target in report["targets"]) == 2 * LINEARS


@pytest.mark.full
def test_grpo(tmp_path):
    steps, prompts, generations, tokens = 2, 2, 2, 8
    run([sys.executable, "-c", f"import offline; offline.checkpoint('random', folder={str(tmp_path)!r})"], EXAMPLES)
    sizes = {"model": tmp_path, "steps": steps, "prompts": prompts, "generations": generations, "tokens": tokens}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    off, on, auto = records = [
        run_example("grpo_trl.py", *arguments, "--same-bits", folder=tmp_path, patch=patch, NF4_PATCH_MATMUL=matmul)
        for matmul, patch in (("off", False), ("off", True), ("auto", True))
    ]
    for record in records:
        assert record["rollouts"]["tokens"] == steps * prompts * generations * tokens
        assert record["rollouts"]["rewards"] == off["rollouts"]["rewards"] and len(record["seconds"]) == steps
        assert same_training(record, off)  # with matmul="auto" too: on the CPU the fused matmul never runs
    assert hits(on) == hits(auto) == steps * LINEARS and hits(off) == 0 and not fallbacks(on)
    # A linear layer multiplies once a token in generation, and with a gradient in the forward and in the recompute.
    # On the CPU no kernel multiplies few rows, and the prompts and the training have many.
    missed = {"NOT_CUDA": steps * (tokens - 1), "MATMUL_OPERANDS": steps * 2, "NOT_FASTER": steps * 3}
    assert fallbacks(auto) == {name: count * LINEARS for name, count in missed.items()}


@pytest.mark.full
@pytest.mark.parametrize("pads", [True, False])
def test_generate(pads, tmp_path):
    """Llama's tokenizer has no token for padding."""
    offline.checkpoint("random", folder=str(tmp_path))
    tokenizer = offline.byte_tokenizer()
    tokenizer.pad_token = "<pad>" if pads else None
    tokenizer.save_pretrained(tmp_path)
    words = "--model", tmp_path, "--new-tokens", 3, "--batches", 1, 3
    record = run_example("generate.py", *words, folder=tmp_path)
    assert [row["equal"] for row in record["generation"]] == [True, True]
    assert not fallbacks(record)  # nor hits: on the CPU generation runs in bitsandbytes' own fused kernel


@pytest.mark.full
@pytest.mark.parametrize("name", ["random", "random-qwen-moe", "random-gpt-oss"])
def test_merge(name, tmp_path, patched):
    """Merge an adapter that was trained on 4-bit weights.

    The model in the saved checkpoint is the same, except for rounding to 16 bits.
    """
    base, packed, adapter, out = (str(tmp_path / each) for each in ("base", "packed", "adapter", "merged"))
    run([sys.executable, "-c", f"import offline; offline.checkpoint({name!r}, folder={base!r})"], EXAMPLES)
    patched.enable(experts="4bit")
    in_4_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    model = load(base, quantization_config=in_4_bits)
    model.save_pretrained(packed)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(packed)
    experts = {} if name == "random" else {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    torch.manual_seed(0)
    trained = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], **experts)).eval()
    with torch.no_grad():
        for key, parameter in trained.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.05)
    trained.save_pretrained(adapter)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        want = trained(input_ids=ids).logits.float()
    run_example("merge_adapter.py", "--model", packed, "--adapter", adapter, "--out", out, folder=tmp_path)
    patched.disable()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())

    def tensors(folder):
        loaded = safetensors.torch.load_file(f"{folder}/model.safetensors")
        return {key: (tensor.shape, tensor.dtype) for key, tensor in loaded.items()}

    assert tensors(out) == tensors(base)

    def off_by(folder):
        merged = load(folder) if folder == out else peft.PeftModel.from_pretrained(load(folder), adapter)
        with torch.no_grad():
            return ((merged.eval()(input_ids=ids).logits.float() - want).norm() / want.norm()).item()

    onto_the_original, onto_what_was_trained = off_by(base), off_by(out)
    assert onto_what_was_trained < 0.02 and 4 * onto_what_was_trained < onto_the_original


@pytest.mark.full
def test_from_a_mixture_to_merged_weights(tmp_path):
    """Run the two commands of docs/after-training.md. Untrained weights equal the dequantized packed weights."""
    trained = "--attention-only --checkpointing --steps 2 --tokens 32 --packed packed --out adapter"
    run_example("qlora_moe.py", *trained.split(), folder=tmp_path)
    merged = "--model packed --adapter adapter --out merged --device cpu"
    run_example("merge_adapter.py", *merged.split(), folder=tmp_path)
    base = "import offline; offline.checkpoint('random-qwen-moe', folder='base')"
    run([sys.executable, "-c", base], tmp_path, PYTHONPATH=f"{EXAMPLES}")
    merged, base = (safetensors.torch.load_file(tmp_path / each / "model.safetensors") for each in ("merged", "base"))
    assert merged.keys() == base.keys()
    off = {key: (merged[key] - base[key]).float().norm() / base[key].float().norm() for key in base}
    in_4_bits = {key for key, by in off.items() if 0.05 < by < 0.2}
    assert in_4_bits == {key for key in base if "proj" in key} and not any(off[key] for key in base.keys() - in_4_bits)


CACHED = {"NF4_PATCH_CACHE": "1GiB"}  # it does nothing there: docs/usage.md, several GPUs
BY_ACCELERATE = (*TORCHRUN, SUPPORT / "fsdp_on_cpu.py")
TWO_PROCESSES = {  # the launcher, arguments, variables, bytes that are sharded
    "ddp": (GLOO, (), {}, 0),
    "fsdp2": (GLOO, ("--fsdp",), {}, SHARDED_BYTES),
    "fsdp1 by accelerate": ((*BY_ACCELERATE, EXAMPLES / "fsdp1.yaml"), (), CACHED, SHARDED_BYTES),
    "fsdp2 by accelerate": ((*BY_ACCELERATE, EXAMPLES / "fsdp2.yaml"), (), CACHED, SHARDED_BYTES),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(name, tmp_path):
    launcher, mode, variables, sharded = TWO_PROCESSES[name]
    arguments = ("--steps", 2, "--tokens", 32, "--same-bits", *mode)
    on, off = on_and_off("qlora_torchrun.py", *arguments, folder=tmp_path, launcher=launcher, **variables)
    assert on["hits_by_process"] == [2 * LINEARS] * 2 and off["hits_by_process"] == [0, 0]
    assert not fallbacks(on) and on["sharded_bytes"] == sharded
    assert not (variables and on["nf4_patch"]["cache"]["hits"])


@pytest.mark.full
@pytest.mark.parametrize("mode", [(), ("--fsdp",)], ids=["ddp", "fsdp2"])
def test_two_processes_with_the_profile_fast(mode, tmp_path):
    """The fused LoRA layers learn what peft's layers learn, apart from rounding."""
    arguments = ("qlora_torchrun.py", "--steps", 2, "--tokens", 96, *mode)
    options = {"folder": tmp_path, "launcher": GLOO, "NF4_PATCH_GRAPHS": "off"}  # the interpreter captures no graph
    on = run_example(*arguments, **options)
    off = run_example(*arguments, patch=False, **options)
    assert on["losses"] == pytest.approx(off["losses"], abs=1e-3) and not same_training(on, off)
    assert not fallbacks(on) and all(count > 2 * LINEARS for count in on["hits_by_process"])


@pytest.mark.full
def test_a_packed_checkpoint_is_sharded(tmp_path):
    """A model that fits on no single GPU starts best from such a checkpoint."""
    run([sys.executable, PROGRAMS / "pack_checkpoint.py", EXAMPLES, tmp_path / "packed"], tmp_path)
    arguments = ("--fsdp", "--model", tmp_path / "packed", "--steps", 2, "--tokens", 32, "--same-bits")
    record = run_example("qlora_torchrun.py", *arguments, folder=tmp_path, launcher=GLOO)
    assert record["hits_by_process"] == [2 * LINEARS] * 2 and not fallbacks(record)
    assert record["sharded_bytes"] == SHARDED_BYTES


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "variables", "hits"),
    [
        ((TRAINING,), {}, [0]),
        ((TRAINING,), {"NF4_PATCH": "1"}, [1]),
        ((*BY_RUN, TRAINING), {}, [1]),
        (("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", TRAINING), {"NF4_PATCH": "1"}, [1]),
        ((*TORCHRUN, TRAINING), {"NF4_PATCH": "1"}, [1, 1]),
        (("-m", "IPython", "-c", f"%load_ext nf4_patch\n%run {TRAINING}"), {}, [1]),
        ((WORKERS, "fork"), {"NF4_PATCH": "1"}, [1, 2]),
        ((WORKERS, "spawn"), {"NF4_PATCH": "1"}, [1, 2]),
        ((*BY_RUN, WORKERS, "spawn"), {}, [1, 2]),
    ],
    ids=["nothing", "variable", "run", "accelerate", "torchrun", "ipython", "forked", "spawned", "run and spawned"],
)
def test_no_change_of_code(words, variables, hits, tmp_path):
    output = run([sys.executable, *words], tmp_path, **variables)
    assert list(map(int, re.findall(r"hits: (\d+)", output))) == hits


def test_notebook_extension(patched):
    """Call the functions of %load_ext and %unload_ext."""
    patched.disable()
    patched.load_ipython_extension(None)
    assert patched.is_enabled()
    patched.unload_ipython_extension(None)
    assert not patched.is_enabled()


TRAINED = f"import nf4_patch, runpy\nimport bitsandbytes\nrunpy.run_path({str(TRAINING)!r}, run_name='__main__')"
FELL_BACK = """import nf4_patch; nf4_patch.enable()
import torch, bitsandbytes.functional as F
packed, state = F.quantize_4bit(torch.randn(64, 64))
for _ in range(3): F.dequantize_4bit(packed, absmax=state.absmax, quant_state=state)
for _ in range(3): F.dequantize_4bit(packed, state, blocksize=64)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("import nf4_patch", [], marks=pytest.mark.full),
        pytest.param(TRAINED, [], marks=pytest.mark.full),
        pytest.param("import nf4_patch; nf4_patch.enable(); import bitsandbytes", ["INFO"], marks=pytest.mark.full),
        (FELL_BACK, ["INFO", "WARNING"]),
    ],
    ids=["imported", "trained", "enabled", "fell back"],
)
def test_logging(code, said, tmp_path):
    """The import logs nothing. enable() logs one INFO, and each new Reason logs one WARNING."""
    head = "import logging, sys; logging.basicConfig(format='LOG %(levelname)s %(name)s %(message)s', level=20)\n"
    lines = [line for line in python(head + code, cwd=tmp_path).stderr.splitlines() if line.startswith("LOG")]
    lines = [line for line in lines if line.split()[2] == "nf4_patch"]
    assert [line.split()[1] for line in lines] == said
    texts = {"INFO": "LOG INFO nf4_patch nf4_patch is on", "WARNING": "dequantize_4bit runs the original"}
    assert all(texts[level] in line for level, line in zip(said, lines, strict=True))
