"""Check every code block of README and docs. Python blocks run, and each command runs or says why not. Other blocks are output.

A Python block runs by itself on the CPU, with the names of NAMES defined. Nothing is downloaded. Every line of a bash
block must be in RUN or ELSEWHERE.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from run_example import completed

import nf4_patch
from benchmarks.checkpoint import load_4bit
from examples.offline import byte_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUT = ("text", "{toctree}", "{eval-rst}", "{include}")  # shown, not typed
DENSE, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"  # a tiny one is loaded in its place
PACKED = "qwen3-30b-4bit"  # and the tiny one packed, unless the block saves it
ADAPTER = "my-adapter"  # and one of the tiny one
OFFLINE = """import datasets
datasets.load_dataset = lambda *_, **__: datasets.Dataset.from_dict({"text": ["some text"] * 8})
"""
TRAIN = """
import torch, bitsandbytes
layer = bitsandbytes.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16).to("cpu")
layer(torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
"""


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\S*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


# a line of a bash block that is run, with train.py in the working directory -> what it prints once
RUN = {
    "NF4_PATCH=1 NF4_PATCH_STRICT=1 python train.py": f"nf4_patch {nf4_patch.__version__} is on: NF4_PATCH=1",
    "nf4-patch run --report torchrun --nproc-per-node 8 train.py": "1 dequantizations in the kernel, 0 fell back",
    "nf4-patch run --report accelerate launch --num_processes 8 train.py": "1 dequantizations in the kernel, 0 fell back",
}
# and one that is not -> why, and what runs it instead
ELSEWHERE = {
    "nf4-patch doctor": "in the tests' own process: tools/test_cli.py",
    "NF4_PATCH=1 torchrun --nproc-per-node 8 train.py": "integration/test_examples.py, test_no_change_of_code",
    "NF4_PATCH=1 accelerate launch --num_processes 8 train.py": "integration/test_examples.py, test_no_change_of_code",
    "NF4_PATCH=1 accelerate launch --config_file examples/fsdp2.yaml --num_processes 8 train.py": (
        "needs two GPUs: gpu/test_distributed.py; over gloo in integration/test_examples.py"
    ),
    "nf4-patch verify": "half a minute: tools/test_cli.py",
    "pip install . bitsandbytes peft transformers trl liger-kernel": "installs packages; of a wheel: integration/test_releases.py",
    "source .venv/bin/activate": "changes the shell alone",
    f"python examples/merge_adapter.py --model {MIXTURE} --adapter {ADAPTER} --out merged": (
        "downloads 61 GB; of tiny models: integration/test_merge_by_layer.py"
    ),
    f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python examples/qlora_moe.py --model {MIXTURE} --checkpointing "
    f"--liger-loss --tokens 2048 --adamw-8bit --offload 6GiB --packed qwen3-30b-4bit --out {ADAPTER}": (
        "needs a GPU; of a tiny model: integration/test_examples.py"
    ),
    f"python examples/merge_adapter.py --model qwen3-30b-4bit --adapter {ADAPTER} --out merged": (
        "needs the line above; of a tiny model: integration/test_examples.py"
    ),
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py": "train.py is the block above, which is run",
    "scripts/demo": "installs packages; the demo itself: integration/test_examples.py",
    "scripts/test": "is this run: see .ci/run",
}


def commands_of(block: Block) -> list[str]:
    return [line for line in (line.split("  #")[0].strip() for line in block.text.splitlines()) if line]


# --- what a Python block finds ---


def trainer(folder: Path, checkpoint: str) -> Any:
    """Return a Trainer of transformers for one step of a tiny 4-bit Llama with LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=1, use_cpu=True, report_to="none", save_strategy="no"
    )
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}]
    return Trainer(get_peft_model(load_4bit(checkpoint, "cpu"), lora), arguments, train_dataset=data)


def mixture_of_experts(folder: Path, checkpoint: str) -> torch.nn.Module:
    import tiny_experts

    return tiny_experts.random_model("qwen3", vocab_size=512)  # byte_tokenizer has 259 tokens


def checkpoint_of_experts(folder: Path) -> str:
    mixture_of_experts(folder, "").save_pretrained(folder / "experts")
    byte_tokenizer().save_pretrained(folder / "experts")
    return str(folder / "experts")


def packed_checkpoint_of_experts(folder: Path) -> str:
    with nf4_patch.enabled(experts="4bit"):
        load_4bit(checkpoint_of_experts(folder), "cpu").save_pretrained(folder / "packed")
    return str(folder / "packed")


def adapter(folder: Path) -> str:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    get_peft_model(mixture_of_experts(folder, ""), lora).save_pretrained(folder / "adapter")
    return str(folder / "adapter")


NAMES: dict[str, Callable[[Path, str], Any]] = {"trainer": trainer, "model": mixture_of_experts}


OF_A_FILE = re.compile(r"# ((?:nf4_patch|tests)/\S+\.py)(, at the end of (\w+))?\n")


@pytest.mark.full
def test_a_library_is_added_as_it_is_written(tmp_path):
    """Write the blocks of add-a-library.md into a copy of the tree in which `toy` is installed.

    The library's test passes, the page of replaced functions has the new row, and neither ruff nor mypy finds a fault.
    """
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
    (tmp_path / "toy.py").write_text("def unpack(packed, quant_state):\n    raise AssertionError('the original ran')\n")
    (tmp_path / "toy-1.0.dist-info").mkdir()
    (tmp_path / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    typed = [block.text for block in BLOCKS if block.page.name == "add-a-library.md"]
    for match, text in ((OF_A_FILE.match(text), text) for text in typed):
        file = tree / match[1]
        if match[2]:
            before, start, after = file.read_text().partition(f"\n{match[3]} = [\n")
            text = before + start + after.replace("\n]", f"\n{text.removeprefix(match[0])}]", 1)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert len(typed) == 4
    lint = ("-m ruff check --no-cache nf4_patch tests/patching/test_toy.py", "-m mypy --no-incremental")
    for command in ("-m pytest -p no:cacheprovider tests/patching/test_toy.py", "scripts/render_docs.py", *lint):
        done = completed([sys.executable, *command.split()], tree, subprocess.STDOUT, PYTHONPATH=f"{tree}:{tmp_path}")
        assert done.returncode == 0, done.stdout
    assert (
        "| toy >= 1.0 | `unpack`: every 4-bit weight of toy | 1.0 |"
        in (tree / "docs" / "data" / "targets.md").read_text()
    )


SLOW = pytest.mark.full  # whole models that are compiled, and trainings with TRL


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=[SLOW] * any(map(b.text.count, (".compile(", "SFTTrainer("))), id=str(b)) for b in BLOCKS],
)
def test_code_block(block, tmp_path, checkpoint, monkeypatch):
    assert block.language in ("python", "bash", *OUTPUT), "python, bash, or text for what is printed"
    if block.language == "python" and not OF_A_FILE.match(block.text):
        monkeypatch.chdir(tmp_path)
        script = ModuleType("script")  # enable() looks for copies of functions in modules, and finds a script's
        monkeypatch.setitem(sys.modules, script.__name__, script)
        used = [name for name in NAMES if re.search(rf"\b{name}\.", block.text)]
        vars(script).update({name: NAMES[name](tmp_path, checkpoint) for name in used})
        code = block.text
        if not torch.cuda.is_available():
            code = code.replace('"cuda"', '"cpu"').replace('{"": 0}', '{"": "cpu"}')
            code = re.sub(
                r"\b(SFT|GRPO)Config\(",
                r"\1Config(use_cpu=True, max_steps=1, report_to='none', output_dir=",
                re.sub(r",\s*max_steps=\d+", "", code),
            )
        if PACKED in code and "save_pretrained" not in code:
            code = code.replace(PACKED, packed_checkpoint_of_experts(tmp_path))
        if DENSE in code:
            code = code.replace(DENSE, checkpoint)
        if MIXTURE in code:
            code = code.replace(MIXTURE, checkpoint_of_experts(tmp_path))
        if ADAPTER in code:
            code = code.replace(ADAPTER, adapter(tmp_path))
        if "SFTTrainer(" in code:  # the loss of TRL needs Triton's interpreter, which does not run Liger's kernels
            code = (
                code if torch.cuda.is_available() else code.replace("use_liger_kernel=True", "use_liger_kernel=False")
            )
            (tmp_path / "script.py").write_text(OFFLINE + code)
            done = completed([sys.executable, "script.py"], tmp_path, subprocess.STDOUT)
            assert done.returncode == 0 and re.search(r"[1-9]\d* dequantizations in the kernel", done.stdout), (
                done.stdout
            )
            return
        exec(compile(code, str(block), "exec"), vars(script))
        if "trainer.train()" in code and ".compile(" not in code:  # whose calls are not all counted
            assert nf4_patch.status().hits > 0


REST = pytest.mark.full  # of launchers tools/test_run.py runs torchrun at every change


@pytest.mark.parametrize("command", [pytest.param(c, marks=REST, id=c) for c in RUN])
def test_command(command, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    two = command.replace("--nproc-per-node 8", "--standalone --nproc-per-node 2").replace("processes 8", "processes 2")
    words = shlex.split(two)
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    done = completed(words[len(variables) :], tmp_path, subprocess.STDOUT, **variables)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(RUN[command]) == 1, done.stdout


def test_commands_are_of_the_pages_and_their_tests_exist():
    typed = {command for block in BLOCKS if block.language == "bash" for command in commands_of(block)}
    assert typed == RUN.keys() | ELSEWHERE.keys(), "add to RUN what a command prints, or to ELSEWHERE why it is not run"
    for reason in ELSEWHERE.values():
        for test in re.findall(r"\w+/test_\w+\.py", reason):
            assert (ROOT / "tests" / test).exists(), test
