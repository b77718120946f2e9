"""python -m benchmarks.rollouts: ``generate`` with an unmerged LoRA adapter, and steps of TRL's GRPO.

Each side has its own process, because Unsloth patches a whole process.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

import nf4_patch
from benchmarks import run_alone
from benchmarks.kinds import LIBRARIES, STOCK, UNSLOTH, model_of
from benchmarks.models import LINEARS, OTHERS, config_of, other
from benchmarks.sides import Process
from benchmarks.timing import Machine, machine, synchronize
from benchmarks.training import llama, peft_model
from nf4_patch.tools.report import Progress, Report, require_gpu, require_patch, silent, table

LAYERS, PROMPT, TOKENS, ROUNDS = 8, 16, 128, 3
BATCHES, MODELS = (1, 8, 32), ("llama", "qwen3.5")
CHANGED = 1.2  # if GRPO's first side takes this many times as long in its other run, the sides cannot be compared
GRPO = Path(__file__).parents[1] / "examples" / "grpo_trl.py"
METHOD = (
    f"generate: layers of Llama-3.1-8B (8 unless a row says otherwise) or of another model, LoRA on all linear layers (for a mixture "
    f"on the attention), greedy, {TOKENS} tokens after a prompt of {PROMPT}; sides alternate, medians, wall-clock time. Each generate "
    "has a new cache. Before, each token had the largest logit in the side's own forward without the patch, apart from rounding. In "
    "a mixture, at least four tokens in five had it, because rounding can change a token's experts. "
    "replays: CUDA graphs replayed per generate, as the library counts them: nf4_patch counts the layers in a graph, Unsloth the "
    "steps. equal: whether the tokens are those of the first side. grpo: examples/grpo_trl.py, 4 layers, 8 prompts, 8 completions of "
    "256 tokens each, one process per side, medians of the steps after the first half; the first side ran at the beginning and at the "
    "end, and its row has the faster run; rest_s: a step without its generation; "
    "Unsloth: its loader, adapters, trainer and their defaults in the same script, benchmarks/grpo_unsloth.py."
)


class Side(NamedTuple):
    kind: str  # kind of model, as in benchmarks.kinds
    options: dict[str, str] | None  # arguments of nf4_patch.enable, None if the patch is off
    static: bool = False  # whether keys and values lie in a static cache
    environment: tuple[tuple[str, str], ...] = ()  # set before Unsloth is imported

    @property
    def exact(self) -> bool:
        """Return whether the tokens must equal those without the patch with a static cache."""
        return self.static and self.options in (None, {"graphs": "auto"})

    @property
    def replays(self) -> bool:
        """Return whether CUDA graphs must have run."""
        profile = self.options or {}
        return "graphs" in profile or "profile" in profile or (DECODE_GRAPHS, "1") in self.environment


DECODE_GRAPHS = "UNSLOTH_DECODE_CUDA_GRAPHS"
EAGER = "bitsandbytes and peft, static cache"
SIDES = {
    "graphs": Side(STOCK, {"matmul": "auto", "graphs": "auto"}, True),
    "fast": Side(STOCK, {"profile": "fast"}, True),
    "unsloth, decode graphs": Side(UNSLOTH, None, environment=((DECODE_GRAPHS, "1"),)),
}
OTHER_SIDES = {
    EAGER: Side(STOCK, None, True),
    "graphs only": Side(STOCK, {"graphs": "auto"}, True),
}  # of other models than Llama


class Training(NamedTuple):
    """A side of GRPO: environment variables, and the program with its arguments."""

    variables: dict[str, str]
    words: tuple[str, ...] = ()
    program: tuple[str, ...] = (str(GRPO),)


OFF, SAME_BITS = {"NF4_PATCH": "0"}, ("--same-bits",)
TRAININGS = {
    "bitsandbytes and peft": Training(OFF, SAME_BITS),
    "patch": Training({"NF4_PATCH_MATMUL": "auto"}, SAME_BITS),
    "fast": Training({}),
    UNSLOTH: Training(OFF, SAME_BITS, ("-m", "benchmarks.grpo_unsloth")),
}


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
    """The model of a side, with its options switched on.

    Args:
        configuration: makes the model's config, after Unsloth's import.
    """

    def __init__(self, side: Side, configuration: Callable[[], Any]):
        os.environ.update(side.environment)
        if side.kind == UNSLOTH:
            importlib.import_module("unsloth")
        config = configuration()
        self.side, self.mixture = side, hasattr(config, "num_experts")
        self.model = peft_model(config, LINEARS[:4]) if self.mixture else model_of(side.kind, config)
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
        """Generate once. Return an error about the tokens, or ""."""
        self.switch_on()
        found = self.generated(batch, tokens)
        rows = torch.cat((self.prompts(batch), torch.tensor(found)), 1).to(self.device)
        nf4_patch.disable()
        with torch.no_grad():
            logits = self.model(input_ids=rows).logits[:, PROMPT - 1 : -1].float()
        chosen = logits.gather(2, rows[:, PROMPT:, None])[..., 0]
        below = (logits.amax(2) - chosen) / logits.std()
        # In a mixture, rounding can change a token's experts, which moves its logits by a standard deviation and more.
        missed = float(below.quantile(0.8 if self.mixture else 1.0))
        if self.side.options is not None:
            self.switch_on()
            self.generated(batch, tokens)  # records its graphs again
        tokens_are = "a fifth of the tokens' logits are at least" if self.mixture else "a token's logit is"
        return "" if missed <= 0.5 else f"{tokens_are} {missed:.2f} standard deviations below the largest"

    def replays(self) -> tuple[int, str]:
        """Return how many graphs were replayed so far, and Unsloth's message if it does not replay."""
        if self.side.kind != UNSLOTH:
            return nf4_patch.status().graphs.replays, ""
        states = list(importlib.import_module("unsloth.models._decode_graphs")._states(self.model))
        return sum(state.replays for state in states), ", ".join(str(s.disabled) for s in states if s.disabled)

    def measure(self, batch: int, tokens: int) -> tuple[float, int, str]:
        """Return the seconds, the number of replays, and why there are none."""
        before, _ = self.replays()
        synchronize()
        begin = time.perf_counter()
        self.generated(batch, tokens)
        synchronize()
        taken = time.perf_counter() - begin
        after, why = self.replays()
        return taken, after - before, why


def generation(
    sides: Mapping[str, Side], configuration: Callable[[], Any], labels: Mapping[str, Any], batches: Iterable[int],
    tokens: int, deadline: float = math.inf, tell: Progress = silent,
) -> tuple[list[Any], list[str]]:  # fmt: skip
    """Return the rows of ``generate`` for the sides whose libraries are installed, and the failures.

    Args:
        labels: fields of every row: the model and its number of layers.
        deadline: a time of ``time.monotonic``. After it, no call begins, and a call that still runs is ended with its side.
    """
    sides = {n: side for n, side in sides.items() if importlib.util.find_spec(LIBRARIES.get(side.kind, "peft"))}
    processes = {name: Process(partial(Generating, side, configuration)) for name, side in sides.items()}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []

    def ask(name: str, *request: Any, sent: bool = False) -> Any:
        left = deadline - time.monotonic()
        if name not in processes or left < 0:
            return None
        if not sent:
            processes[name].send(*request)
        late = not processes[name].pipe.poll(None if left == math.inf else left)
        answer, error = (None, "not finished in time") if late else processes[name].receive()
        if error or (isinstance(answer, str) and answer):
            failures.append(f"{name}, {request}: {error or answer}")
            tell(failures[-1])
        if error:
            processes.pop(name).process.kill()
        return answer

    try:
        for process in processes.values():
            process.send("replays")
        for name in sides:  # all are built before the first generates, and before a cache takes the free memory
            tell(f"building {name}")
            ask(name, "replays", sent=True)
        for batch in batches:
            for name in sides:
                tell(f"{batch} sequences, {name}")
                ask(name, "warm_up", batch, tokens)
            exact = [name for name, side in sides.items() if side.exact]
            chosen = {name: ask(name, "generated", batch, tokens) for name in exact if len(exact) > 1}
            taken: dict[str, list[tuple[float, int, str]]] = {name: [] for name in sides}
            for _ in range(ROUNDS):
                for name in sides:
                    if (found := ask(name, "measure", batch, tokens)) is not None:
                        taken[name].append(found)
            for name, found in taken.items():
                if not found:
                    continue
                times = [seconds for seconds, _, _ in found]
                median, (_, replays, why) = statistics.median(times), found[-1]
                row = {
                    "what": "generate", **labels, "side": name, "batch": batch, "tokens_s": batch * tokens / median,
                    "spread": (max(times) - min(times)) / median, "rounds": len(times), "replays": replays,
                }  # fmt: skip
                if chosen.get(name) and chosen[exact[0]]:
                    row["equal"] = chosen[name] == chosen[exact[0]]
                    if not row["equal"]:
                        failures.append(f"{name}, {batch} sequences: other tokens than {exact[0]}")
                if sides[name].replays and not replays and torch.cuda.is_available():
                    failures.append(f"{name}, {batch} sequences: no CUDA graph ran: {why}")
                rows.append(row)
                tell(json.dumps(row))
    finally:
        for process in processes.values():
            process.process.kill()
    return rows, failures


def grpo(deadline: float = math.inf, tell: Progress = silent) -> tuple[list[Any], list[str]]:
    """Return the rows of GRPO's steps, and the failures. A side that is not done at ``deadline`` is ended.

    The first side runs once more at the end. Its row has the faster of its runs.
    """
    rows: dict[str, Any] = {}
    failures: list[str] = []
    sys.path.insert(0, str(GRPO.parent))
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("offline").checkpoint("random", "8b-4layers", folder)
        torch.cuda.empty_cache()
        for name in (*TRAININGS, next(iter(TRAININGS))):
            left = deadline - time.monotonic()
            if left < 0 or not importlib.util.find_spec(LIBRARIES.get(name, "trl")):
                continue
            tell(f"GRPO, {name}")
            try:
                row = {"what": "grpo", "side": name, **steps_of(TRAININGS[name], folder, left)}
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                failures.append(f"GRPO, {name}: {error}: {str(error.stderr)[-800:]}")
                tell(failures[-1])
                continue
            tell(json.dumps(row))
            rows[name], slower = sorted((rows.get(name, row), row), key=lambda each: each["step_s"])
            if slower["step_s"] > CHANGED * rows[name]["step_s"]:
                failures.append(
                    f"GRPO, {name}: {row['step_s']:.2f} s per step at the end: the host's speed has changed"
                )
    return [*rows.values()], failures


def steps_of(side: Training, folder: str, seconds: float) -> dict[str, Any]:
    """Train one side in a process of its own, which is ended after ``seconds``. Return the figures of its row."""
    file = Path(folder) / "record.json"
    command = [sys.executable, *side.program, "--model", folder, "--json", str(file), *side.words]
    command += ["--steps", "6", "--prompts", "8", "--generations", "8", "--tokens", "256"]
    subprocess.run(
        command, env={**os.environ, **side.variables}, capture_output=True, text=True, check=True,
        cwd=GRPO.parents[1], timeout=None if seconds == math.inf else seconds,
    )  # fmt: skip
    found = (record := json.loads(file.read_text()))["rollouts"]
    return {
        "step_s": found["step"], "generation_s": found["generation"], "rest_s": found["rest"],
        "tokens_s": found["tokens_per_second"], "reward": found["rewards"][-1],
        "replays": found.get("replays", record["nf4_patch"]["graphs"]["replays"]),
    }  # fmt: skip


@click.command()
@click.option("--what", type=click.Choice(["generate", "grpo", "both"]), default="both", show_default=True)
@click.option(
    "--model", "models", multiple=True, type=click.Choice(["llama", *OTHERS]), default=MODELS, show_default=True,
    help="Of generate.",
)  # fmt: skip
@click.option("--layers", type=int, help=f"Of generate. Default: {LAYERS}, and 4 of other models than Llama.")
@click.option(
    "--batches", type=int, multiple=True, help=f"Sequences of generate. Default: {BATCHES}, and 8 of other models."
)
@click.option(
    "--sides", multiple=True, type=click.Choice([*{**SIDES, **OTHER_SIDES}]), help="Of generate. Default: all."
)
@click.option("--seconds", type=float, default=600.0, show_default=True, help="End what is not measured by then.")
@click.pass_obj
def command(
    tell: Progress,
    what: str,
    models: tuple[str, ...],
    layers: int | None,
    batches: tuple[int, ...],
    sides: tuple[str, ...],
    seconds: float,
) -> Rollouts:
    """Measure tokens per second of ``generate`` with an adapter, and steps of GRPO."""
    require_gpu()
    require_patch()
    deadline = time.monotonic() + seconds
    rows: list[Any] = []
    failures: list[str] = []
    for model in models if what != "grpo" else ():
        others = model in OTHERS
        count = layers or (4 if others else LAYERS)
        configuration = partial(other, model, count) if others else partial(config_of, llama(count))
        known, usual = (OTHER_SIDES, (8,)) if others else (SIDES, BATCHES)
        chosen = {name: side for name, side in known.items() if name in (sides or known)}
        labels = {"model": model, "layers": count}
        found, failed = generation(chosen, configuration, labels, batches or usual, TOKENS, deadline, tell)
        rows, failures = rows + found, failures + failed
    if what != "generate":
        try:
            more, failed = grpo(deadline, tell)
        except Exception as error:  # what generate measured is reported
            more, failed = [], [f"GRPO: {error!r}"]
        rows, failures = rows + more, failures + failed
    return Rollouts(machine(), rows, failures)


if __name__ == "__main__":
    from benchmarks import rollouts  # the processes import the class from the module of this name, not from __main__

    run_alone(rollouts.command, "python -m benchmarks.rollouts")
