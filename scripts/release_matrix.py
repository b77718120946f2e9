"""Which releases of the patched libraries work, cell by cell: what is patched, deferred, hit, and equal to the bit.

    python scripts/release_matrix.py                  every cell that this machine can run
    python scripts/release_matrix.py "wrapt 1.16.0"   these cells only
    python scripts/release_matrix.py --as "torch 2.8.0" installed    record the row under this name
    python scripts/release_matrix.py --cell NAME      one cell, in this process, as JSON on stdout
    python scripts/release_matrix.py --record FILE... rows that --cell printed elsewhere, on a GPU machine

A cell puts other releases before the installed ones on the path and runs in a process of its own. Its row is kept in
docs/data/releases.json under its name and the machine. Without a GPU the kernels run under Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("NF4_RELEASES", ROOT / ".releases"))
RECORD = ROOT / "docs" / "data" / "releases.json"


@dataclass(frozen=True)
class Cell:
    """Releases that go before the installed ones, as pip requirements without their dependencies."""

    name: str
    packages: tuple[str, ...] = ()
    unsloth: bool = False  # import Unsloth and run its LoRA autograd function too
    commands: bool = False  # run COMMANDS too

    @property
    def path(self) -> Path:
        return CACHE / "_".join(p.replace("==", "-") for p in self.packages)


# What the extra "bench" is installed for.
COMMANDS = {
    "nf4-patch verify": ("-m", "nf4_patch", "verify"),
    "qlora_peft.py": ("examples/qlora_peft.py", "--steps", "2"),
    "merge_adapter.py": ("examples/merge_adapter.py",),
    "generate.py": ("examples/generate.py", "--batches", "1", "--new-tokens", "4"),
}


def bitsandbytes(release: str) -> Cell:
    return Cell(f"bitsandbytes {release}", (f"bitsandbytes=={release}",))


def unsloth(release: str, zoo: str) -> Cell:
    return Cell(f"unsloth {release}", (f"unsloth=={release}", f"unsloth_zoo=={zoo}"), unsloth=True)


CELLS = (
    Cell("installed"),
    *map(bitsandbytes, ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.2")),
    unsloth("2026.6.9", "2026.6.7"),
    unsloth("2026.9.7", "2026.9.9"),
    unsloth("2026.9.14", "2026.9.9"),
    unsloth("2026.10.9", "2026.10.9"),
    Cell(
        "lowest",  # the lower bounds of pyproject.toml, under the torch that is installed
        (
            "bitsandbytes==0.50.0",
            "transformers==4.56.0",
            "peft==0.15.0",
            "accelerate==1.0.0",
            "matplotlib==3.9.0",
            "wrapt==1.16.0",
            "click==8.1.0",
            "rich==13.0.0",
            "tokenizers==0.22.0",
            "huggingface_hub==0.34.0",
        ),
        commands=True,
    ),
    Cell("wrapt 1.16.0", ("wrapt==1.16.0",)),
    Cell("wrapt 2.0.1", ("wrapt==2.0.1",)),
    Cell("peft 0.15.2", ("peft==0.15.2",)),
    Cell("transformers 5.0.0", ("transformers==5.0.0", "tokenizers==0.22.2")),
    Cell("transformers 5.17.0", ("transformers==5.17.0",)),
    Cell("transformers 5.23.0", ("transformers==5.23.0",)),
    Cell(
        "transformers 4.51.3, peft 0.15.2",
        ("transformers==4.51.3", "tokenizers==0.21.4", "huggingface_hub==0.36.0", "peft==0.15.2", "accelerate==1.6.0"),
    ),
)


def install(cell: Cell) -> None:
    if cell.packages and not cell.path.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(cell.path)]
        subprocess.run([*command, *cell.packages], check=True)


def run(cell: Cell) -> dict[str, Any]:
    """The cell's row, from a process of its own; what went wrong is a row too."""
    try:
        install(cell)
    except subprocess.CalledProcessError as error:
        return {"cell": cell.name, "error": f"pip: exit {error.returncode}"}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("NF4_")}
    paths = [str(cell.path)] if cell.packages else []
    environ["PYTHONPATH"] = os.pathsep.join([*paths, environ.get("PYTHONPATH", ""), str(ROOT)])
    environ["UNSLOTH_ALLOW_CPU"] = "1"
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", cell.name]
    with tempfile.TemporaryDirectory() as directory:  # Unsloth writes its compiled cache into the working directory
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=directory)
        for line in reversed(done.stdout.splitlines()):
            if line.startswith('{"cell"'):
                row = json.loads(line)
                return row | {"commands": run_commands(environ, directory)} if cell.commands else row
    return {"cell": cell.name, "error": last_line(done)}


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]


def run_commands(environ: dict[str, str], directory: str) -> dict[str, str]:
    """ "ok", or the last line on stderr, of each of COMMANDS."""
    ended = {}
    for name, (first, *words) in COMMANDS.items():
        first = str(ROOT / first) if first.endswith(".py") else first
        done = subprocess.run(
            [sys.executable, first, *words], capture_output=True, text=True, env=environ, cwd=directory
        )
        ended[name] = last_line(done) if done.returncode else "ok"
    return ended


# --- inside the cell's own process ---


def measure(cell: Cell) -> dict[str, Any]:
    import torch

    from nf4_patch.tools.cases import place_of, use_interpreter_without_gpu
    from nf4_patch.tools.report import installed_releases

    use_interpreter_without_gpu()
    import nf4_patch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    nf4_patch.enable()
    libraries = ("bitsandbytes.functional", "transformers.integrations.moe")
    for module in ("unsloth",) * cell.unsloth + libraries:
        with contextlib.suppress(ModuleNotFoundError):  # those of experts in old releases
            importlib.import_module(module)
    row: dict[str, Any] = {"cell": cell.name, "place": place_of(device)}
    row["releases"] = installed_releases()
    row["python"] = sys.version.split()[0]
    row["targets"] = {t.name: t.state for t in nf4_patch.status().targets}
    row["notes"] = [f"{t.name}: {t.note}" for t in nf4_patch.status().targets if t.state == "refused"]
    nf4_patch.disable()
    row["states"] = states(device)
    row["step"] = peft_step(device)
    if not cell.unsloth:  # it hands bitsandbytes' layers ``weight.data``, which is no parameter and never cached
        row["cache"] = cached_step(device)
    packs_experts = importlib.util.find_spec("bitsandbytes.nn.parametrize")  # from 0.48 on
    if packs_experts and "transformers.integrations.moe" in sys.modules:
        row["experts"] = experts_step(device)
    if cell.unsloth:
        row["unsloth"] = unsloth_step(device)
    return row


def counts() -> dict[str, int]:
    import nf4_patch

    return {t.name: t.hits for t in nf4_patch.status().targets if t.hits}


def unexpected() -> dict[str, int]:
    """Fallbacks that were not meant to be: what is no 4-bit weight, and what a library's own kernel keeps, are."""
    import nf4_patch

    meant = {"NOT_4BIT", "DEFERRED"}
    rows = nf4_patch.status().targets
    return {f"{t.name}: {r}": n for t in rows for r, n in t.fallbacks.items() if r not in meant}


def states(device) -> dict[str, Any]:
    """Random states through the patched dequantize_4bit: on the GPU the bits of the original, on the CPU of the formula.

    bitsandbytes' CPU code is another one than its CUDA library: it came with 0.46, raised on odd sizes before 0.50, and
    from 0.47 to 0.49 some of its bits are others. How often it agrees is counted too.
    """
    import bitsandbytes.functional as F
    import torch

    import nf4_patch
    from nf4_patch.nf4.dequantize import reference
    from nf4_patch.patching.counters import counters
    from nf4_patch.patching.quant_state import weight_of
    from nf4_patch.tools.cases import ask_bitsandbytes

    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from fuzz import draw, random_state, same

    counters.reset()
    asked = agreed = equal = cases = 0
    number = -1
    while cases < (200 if device.type == "cuda" else 40):
        number += 1
        case = draw(11, number, device.type, (64, 128, 4096))
        if case.start % 4 or (case.storage is not torch.uint8 and device.type == "cpu"):
            continue
        packed, state = random_state(case, 11, device)
        nf4_patch.disable()
        want = reference.dequantize(weight_of(packed, state))
        try:
            theirs = ask_bitsandbytes(packed, state)
        except Exception:
            if device.type == "cuda":
                raise
        else:
            asked += 1
            agreed += same(theirs, want)
            want = theirs if device.type == "cuda" else want
        nf4_patch.enable()
        got = F.dequantize_4bit(packed, state)
        cases += 1
        equal += same(got, want)
    hits = sum(counts().values())
    missed = unexpected()
    nf4_patch.disable()
    return {"cases": cases, "equal": equal, "hits": hits, "asked": asked, "agreed": agreed, "fallbacks": missed}


def with_and_without(once: Callable[[], list[Any]]) -> dict[str, Any]:
    """Whether the tensors of ``once`` are equal to the bit, and the hits."""
    import torch

    import nf4_patch
    from nf4_patch.patching.counters import counters

    nf4_patch.disable()
    try:
        without = once()
    except Exception as error:
        return {"error": f"the release itself: {type(error).__name__}: {str(error)[:120]}"}
    counters.reset()
    nf4_patch.enable()
    with_patch = once()
    hits, missed = counts(), unexpected()
    nf4_patch.disable()
    equal = all(map(torch.equal, with_patch, without)) and len(with_patch) == len(without)
    return {"hits": hits, "equal": equal, "fallbacks": missed}


def peft_step(device) -> dict[str, Any]:
    """A checkpointed LoRA step over two Linear4bit, with and without: output, gradients, hits."""
    import bitsandbytes as bnb
    import peft
    import torch

    def once() -> list[Any]:
        torch.manual_seed(0)
        options = {"quant_type": "nf4", "compute_dtype": torch.bfloat16}
        base = torch.nn.Sequential(
            bnb.nn.Linear4bit(256, 384, bias=True, **options),
            torch.nn.SiLU(),
            bnb.nn.Linear4bit(384, 128, bias=False, compress_statistics=False, **options),
        ).to(device)
        base.is_loaded_in_4bit = True
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights="gaussian"))
        x = torch.randn(2048, 256, device=device, dtype=torch.bfloat16).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(model.to(device), x, use_reentrant=False)
        y.float().square().mean().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    return with_and_without(once)


def cached_step(device) -> dict[str, Any]:
    """Steps of a layer with a weight cache: what it holds before and after a garbage collection, and the hits after it."""
    import gc

    import bitsandbytes as bnb
    import torch

    import nf4_patch

    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 128, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).to(device)
    x = torch.randn(2048, 256, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> list[Any]:
        y = layer(x)
        (gradient,) = torch.autograd.grad(y.float().square().mean(), x)
        return [y.detach(), gradient]

    nf4_patch.disable()
    try:
        want = step()
    except Exception as error:
        return {"error": f"the release itself: {type(error).__name__}: {str(error)[:120]}"}
    with nf4_patch.enabled(cache="1GiB"):
        equal = all(map(torch.equal, step(), want))
        before = nf4_patch.status().cache
        gc.collect()
        after = nf4_patch.status().cache
        equal &= all(map(torch.equal, step(), want))
        hits = nf4_patch.status().cache.hits - after.hits
    return {"held": before.weights, "kept": after.weights, "hits": hits, "equal": equal}


def experts_step(device) -> dict[str, Any]:
    """Forward and backward of a mixture's 4-bit experts, with and without: output, gradient, hits."""
    import torch
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    # bf16 on a CPU from 0.50 on only: bitsandbytes 0.48 rounds it otherwise there.
    old = device.type == "cpu" and tuple(map(int, metadata.version("bitsandbytes").split(".")[:2])) < (0, 50)
    dtype = torch.float32 if old else torch.bfloat16
    experts = Qwen3MoeExperts(config).to(device, dtype)
    torch.manual_seed(0)
    for name, parameter in list(experts.named_parameters()):
        torch.nn.init.normal_(parameter)
        replace_parameter_4bit(experts, name, compress_statistics=True)

    def once() -> list[Any]:
        torch.manual_seed(1)
        x = torch.randn(16, 128, device=device, dtype=dtype).requires_grad_()
        scores, chosen = torch.randn(16, 4, device=device).softmax(-1).topk(2)
        y = experts(x, chosen, scores.to(x.dtype))
        y.float().square().mean().backward()
        return [y.detach(), x.grad]

    return with_and_without(once)


def unsloth_step(device) -> dict[str, Any]:
    """Unsloth's fast_dequantize and its LoRA autograd function, against bitsandbytes without the patch."""
    import bitsandbytes as bnb
    import bitsandbytes.functional as F
    import torch
    from unsloth.kernels import fast_lora, utils

    import nf4_patch
    from nf4_patch.patching.counters import counters

    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 512, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    layer = layer.bfloat16().to(device)
    weight, state = layer.weight, layer.weight.quant_state
    nf4_patch.disable()
    want = F.dequantize_4bit(weight, state)
    counters.reset()
    nf4_patch.enable()
    equal = torch.equal(utils.fast_dequantize(weight, state), want)
    equal &= torch.equal(fast_lora.fast_dequantize(weight.t(), state, use_global_buffer=True), want.t())
    x = torch.randn(2, 8, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    A = torch.randn(4, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    B = torch.zeros(512, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = fast_lora.LoRA_W.apply(x, weight, state, A, B, 0.5)
    equal &= torch.equal(y, torch.nn.functional.linear(x, want))  # B is zero: the frozen part alone
    y.float().square().mean().backward()
    gradient = torch.isfinite(x.grad).all().item()
    hits, missed = counts(), unexpected()
    nf4_patch.disable()
    return {"hits": hits, "equal": bool(equal and gradient), "fallbacks": missed}


# --- the record ---


def record(rows: list[dict[str, Any]]) -> None:
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    for row in rows:
        row["commit"] = head.stdout.strip() or "not in a checkout"
    known = json.loads(RECORD.read_text()) if RECORD.exists() else []
    kept = {(row["cell"], row.get("place", "")): row for row in known}
    kept |= {(row["cell"], row.get("place", "")): row for row in rows}
    order = {cell.name: index for index, cell in enumerate(CELLS)}
    everything = sorted(kept.values(), key=lambda row: ("CPU" in row.get("place", "CPU"), order.get(row["cell"], 99)))
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(everything, indent=1) + "\n")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "render_docs.py")], check=True)


def failed(row: dict[str, Any]) -> bool:
    if "error" in row:
        return True
    step, *others = parts = [row[part] for part in ("step", "unsloth", "experts") if part in row]
    wrong = row["states"]["equal"] != row["states"]["cases"] or row["states"]["hits"] < row["states"]["cases"]
    wrong |= not step.get("equal", "error" in step)  # some old releases fail in a PEFT step themselves
    wrong |= not all(part.get("equal") for part in others) or bool(row["notes"])
    cached = row.get("cache", {"error": "recorded before there was one"})
    wrong |= "error" not in cached and not (cached["equal"] and 0 < cached["held"] == cached["kept"] <= cached["hits"])
    wrong |= any(ended != "ok" for ended in row.get("commands", {}).values())
    return wrong or any(part.get("fallbacks") for part in parts)


def main(arguments: list[str]) -> int:
    names = {cell.name: cell for cell in CELLS}
    if arguments[:1] == ["--cell"]:
        print(json.dumps(measure(names[arguments[1]])))
        return 0
    if arguments[:1] == ["--record"]:
        lines = [line for name in arguments[1:] for line in Path(name).read_text().splitlines()]
        record([json.loads(line) for line in lines if line.startswith('{"cell"')])
        return 0
    recorded_as = None
    if arguments[:1] == ["--as"]:
        recorded_as, *arguments = arguments[1:]
        if len(arguments) != 1:
            print("--as NAME goes with one cell", file=sys.stderr)
            return 2
    if unknown := [name for name in arguments if name not in names]:
        print(f"unknown: {', '.join(unknown)}; cells: {', '.join(names)}", file=sys.stderr)
        return 2
    rows = []
    for cell in CELLS:
        if not arguments or cell.name in arguments:
            row = run(cell)
            rows.append(row := row | {"cell": recorded_as or cell.name})
            print("FAILED" if failed(row) else "ok", json.dumps(row), flush=True)
    record(rows)
    return 1 if any(map(failed, rows)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
