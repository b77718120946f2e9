"""python -m benchmarks.rollouts: ``generate`` with a LoRA adapter that is not merged, and steps of TRL's GRPO.

Each side has a process of its own, because Unsloth patches a whole process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

import nf4_patch
from benchmarks import run_alone
from benchmarks.kinds import LIBRARIES, STOCK, UNSLOTH, model_of
from benchmarks.models import config_of
from benchmarks.sides import Process
from benchmarks.timing import Machine, machine, synchronize
from benchmarks.training import llama
from nf4_patch.tools.report import Progress, Report, require_gpu, require_patch, silent, table

LAYERS, PROMPT, TOKENS, ROUNDS = 8, 16, 128, 3
BATCHES = (8, 32)
GRPO = Path(__file__).parents[1] / "examples" / "grpo_trl.py"
METHOD = (
    f"generate: {LAYERS} layers of Llama-3.1-8B, LoRA on all linear layers, greedy, {TOKENS} tokens after a prompt of "
    f"{PROMPT}; sides alternate, medians, wall-clock time. Each generate has a new cache. Before, each token had the "
    "largest logit in the side's own forward without the patch, apart from rounding. grpo: examples/grpo_trl.py, 4 layers, "
    "8 prompts, 8 completions of 256 tokens each, one process per side, medians of the steps after the first half; rest_s: "
    "a step without its generation."
)


class Side(NamedTuple):
    kind: str  # kind of model, as in benchmarks.kinds
    options: dict[str, str] | None  # arguments of nf4_patch.enable, None if the patch is off
    static: bool = False  # whether keys and values lie in a static cache


SIDES = {
    "bitsandbytes and peft": Side(STOCK, None),
    "bitsandbytes and peft, static cache": Side(STOCK, None, True),
    "patch": Side(STOCK, {"matmul": "auto"}),
    "graphs": Side(STOCK, {"matmul": "auto", "graphs": "auto"}, True),
    UNSLOTH: Side(UNSLOTH, None),
}
TRAININGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "bitsandbytes and peft": ({"NF4_PATCH": "0"}, ["--matmul", "off"]),
    "patch": ({}, []),
    "graphs": ({"NF4_PATCH_LORA": "fused"}, ["--graphs", "auto"]),
}  # variables and arguments of the example


@dataclass(frozen=True)
class Rollouts(Report):
    machine: Machine | None
    rows: list[dict[str, Any]]
    failures: list[str] = field(default_factory=list)
    method: str = METHOD

    def render(self) -> Iterable[str]:
        yield str(self.machine)
        yield self.method
        for what in ("generate", "grpo"):
            if rows := [row for row in self.rows if row["what"] == what]:
                yield table(rows)
        yield from self.failures


class Generating:
    """The model of a side, with its options switched on."""

    def __init__(self, side: Side, shape: Any):
        if side.kind == UNSLOTH:
            importlib.import_module("unsloth")
        self.side, self.model = side, model_of(side.kind, config_of(shape))
        torch.manual_seed(1)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, parameter.shape[1] ** -0.5)
        self.model.config.use_cache = True
        self.model.eval()
        if side.kind == UNSLOTH:
            importlib.import_module("unsloth").FastLanguageModel.for_inference(self.model)
        self.device = next(self.model.parameters()).device

    def switch_on(self) -> None:
        if self.side.options is not None:
            nf4_patch.enable(**self.side.options)  # type: ignore[arg-type]

    def prompts(self, batch: int) -> torch.Tensor:
        return torch.randint(3, 500, (batch, PROMPT), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def generated(self, batch: int, tokens: int) -> list[list[int]]:
        """Return ``tokens`` greedy tokens after each prompt."""
        from transformers import GenerationConfig

        prompts = self.prompts(batch)
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1, disable_compile=True,
            cache_implementation="static" if self.side.static else None,
        )  # fmt: skip
        prompts = prompts.to(self.device)
        result = self.model.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=config
        )
        return result[:, PROMPT:].tolist()  # type: ignore[no-any-return]

    def warm_up(self, batch: int, tokens: int) -> str:
        """Generate once. Return what is wrong with the tokens, or an empty string."""
        self.switch_on()
        found = self.generated(batch, tokens)
        rows = torch.cat((self.prompts(batch), torch.tensor(found)), 1).to(self.device)
        nf4_patch.disable()
        with torch.no_grad():
            logits = self.model(input_ids=rows).logits[:, PROMPT - 1 : -1].float()
        chosen = logits.gather(2, rows[:, PROMPT:, None])[..., 0]
        self.switch_on()
        missed = float((logits.amax(2) - chosen).max() / logits.std())
        return f"a token's logit is {missed:.2f} standard deviations below the largest" if missed > 0.5 else ""

    def seconds(self, batch: int, tokens: int) -> float:
        synchronize()
        begin = time.perf_counter()
        self.generated(batch, tokens)
        synchronize()
        return time.perf_counter() - begin


def generation(
    shape: Any, batches: Iterable[int], tokens: int, seconds: float = math.inf, tell: Progress = silent
) -> tuple[list[Any], list[str]]:
    """Return the rows of ``generate`` for the sides whose libraries are installed, and what failed.

    Args:
        seconds: no round begins later than this after the call.
    """
    begin = time.monotonic()
    sides = {n: side for n, side in SIDES.items() if importlib.util.find_spec(LIBRARIES.get(side.kind, "peft"))}
    processes = {name: Process(partial(Generating, side, shape)) for name, side in sides.items()}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []

    def ask(name: str, *request: Any) -> Any:
        if name not in processes:
            return None
        processes[name].send(*request)
        answer, error = processes[name].receive()
        if error or (isinstance(answer, str) and answer):
            failures.append(f"{name}, {request}: {error or answer}")
            processes.pop(name).process.kill()
            return None
        return answer

    try:
        for batch in batches:
            for name in sides:
                tell(f"{batch} sequences, {name}")
                ask(name, "warm_up", batch, tokens)
            taken: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(ROUNDS):
                for name in sides if time.monotonic() - begin < seconds else ():
                    if (found := ask(name, "seconds", batch, tokens)) is not None:
                        taken[name].append(found)
                        tell(f"{batch} sequences, {name}: {batch * tokens / found:.0f} tokens per second")
            for name, times in taken.items():
                if times:
                    median = statistics.median(times)
                    rows.append(
                        {
                            "what": "generate", "side": name, "batch": batch, "layers": shape.num_hidden_layers,
                            "tokens_s": batch * tokens / median, "spread": (max(times) - min(times)) / median,
                        }
                    )  # fmt: skip
    finally:
        for process in processes.values():
            process.process.kill()
    return rows, failures


def grpo(seconds: float, tell: Progress = silent) -> tuple[list[Any], list[str]]:
    """Return the rows of GRPO's steps, and what failed. No side begins later than ``seconds`` after the call."""
    rows: list[Any] = []
    failures: list[str] = []
    begin = time.monotonic()
    sys.path.insert(0, str(GRPO.parent))
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("offline").checkpoint("random", "8b-4layers", folder)
        torch.cuda.empty_cache()
        for name, (variables, words) in TRAININGS.items():
            if time.monotonic() - begin > seconds:
                break
            tell(f"GRPO, {name}")
            file = Path(folder) / "record.json"
            command = [sys.executable, str(GRPO), "--model", folder, "--json", str(file), *words]
            command += ["--steps", "5", "--prompts", "8", "--generations", "8", "--tokens", "256"]
            result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
            if result.returncode:
                failures.append(f"GRPO, {name}: {result.stderr[-800:]}")
                continue
            found = json.loads(file.read_text())["rollouts"]
            tell(f"GRPO, {name}: {found['step']:.2f} s")
            rows.append(
                {
                    "what": "grpo", "side": name, "step_s": found["step"], "generation_s": found["generation"],
                    "rest_s": found["rest"], "tokens_s": found["tokens_per_second"], "reward": found["rewards"][-1],
                }
            )  # fmt: skip
    return rows, failures


@click.command()
@click.option("--what", type=click.Choice(["generate", "grpo", "both"]), default="both", show_default=True)
@click.option("--seconds", type=float, default=600.0, help="Begin no round, and no side of GRPO, later than this.")
@click.pass_obj
def command(tell: Progress, what: str, seconds: float) -> Rollouts:
    """Measure tokens per second of ``generate`` with an adapter, and steps of GRPO."""
    require_gpu()
    require_patch()
    rows: list[Any] = []
    failures: list[str] = []
    if what != "grpo":
        rows, failures = generation(llama(LAYERS), BATCHES, TOKENS, seconds, tell)
    if what != "generate":
        more, failed = grpo(seconds, tell)
        rows, failures = rows + more, failures + failed
    return Rollouts(machine(), rows, failures)


if __name__ == "__main__":
    from benchmarks import rollouts  # the processes import the class from the module of this name, not from __main__

    run_alone(rollouts.command, "python -m benchmarks.rollouts")
