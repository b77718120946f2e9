#!/usr/bin/env python
"""Render the generated parts of README and docs: tables from the code, and tables and figures from docs/data/*.json.

    python scripts/render_docs.py            rewrite outdated parts
    python scripts/render_docs.py --check    list outdated parts and exit 1

A generated part is between ``<!-- NAME: generated -->`` and ``<!-- /NAME -->``, and a generated figure in a sentence
between ``<!-- NAME -->`` and ``<!-- /NAME -->``. NAME is a key of BLOCKS. docs/data/README.md lists the command that
writes each data file. A record is a flat dict: a row of a data file, or one side of such a row.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from nf4_patch.patching.config import VARIABLES
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools import cli, doctor

DATA = ROOT / "docs" / "data"
GPUS = ("H200", "H100")
OURS, GPU_TIME, WALL_TIME = "nf4_patch", "GPU time", "wall-clock time"
RELEASES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")
WORDS = {  # side of the data -> row of a table
    "peft": "a plain TRL script", "16-bit experts": "a plain TRL script, experts in 16 bits", "patch": "the patch",
    "liger": "+ `use_liger_kernel=True`", "fused": '+ `lora="fused"`', "graphs": '+ `graphs="auto"`',
    "graphs, no liger": '`lora="fused"`, `graphs="auto"`, without Liger',
    "activations": '+ `activations="auto"`', "activations, no graphs": '`lora="fused"`, `activations="auto"`, without graphs',
    "cache": "+ a cache with room for every weight",
    "paged optimizer": 'the same with `optim="paged_adamw_8bit"`', "unsloth": "Unsloth",
    "unsloth, block graphs": "Unsloth, `UNSLOTH_BLOCK_CUDAGRAPHS=1`",
    "unsloth, best": 'Unsloth, `UNSLOTH_BLOCK_CUDAGRAPHS=1`, `checkpoint_skip_layers="max"`',
    "unsloth, graphs": 'Unsloth, `enable(graphs="auto")`',
    "unsloth, offloading": "Unsloth, its own checkpoint",
    "unsloth, offloading, graphs": 'Unsloth, its own checkpoint, `enable(graphs="auto")`',
    "bitsandbytes and peft": "bitsandbytes and peft",
    "bitsandbytes and peft, static cache": "bitsandbytes and peft, static cache",
    "bnb": "bitsandbytes and peft", "enable": "`enable()`", "auto": '`enable(matmul="auto")`',
    "bnb plain": "bitsandbytes, no adapter", "enable plain": "`enable()`, no adapter",
    "auto plain": '`enable(matmul="auto")`, no adapter', "dense": "adapter merged into 16-bit weights",
}  # fmt: skip
# smaller differences of wall-clock time and GPU time are called noise
WALL_NOISE, GPU_NOISE = 0.6, 0.02
Record = dict[str, Any]


def sources() -> dict[str, str]:
    """Return data file -> the command that writes it. GPU in the name of a file stands for h100 or h200."""
    return dict(re.findall(r"^\| `([\w.-]+\.json)` \| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def records(name: str, **where: Any) -> list[Record]:
    """Return the records of NAME-GPU.json that have the values of ``where``. The first of GPUS with such a file counts.

    The field ``origin`` is a line with the GPU, the data file and the releases.
    """
    files = {gpu: f"{name}-{gpu.lower()}.json" for gpu in GPUS}
    gpu = next((gpu for gpu, file in files.items() if (DATA / file).exists()), GPUS[0])
    file, data = files[gpu], load(files[gpu])
    rows, machine = data.get("rows", []), data["machine"]
    for section, timed in data.get("sections", {}).items():
        for row in timed:
            names = sorted(row["median"], key=lambda side: side != OURS)
            rows += [side_of(row, side) | {"section": section} for side in names]
    releases = ", ".join(f"{name} {release}" for name, release in machine["releases"].items() if name in RELEASES)
    origin = f"**{gpu}** ([{file}](data/{file}) of {machine['date']} with {releases}):"
    common = {"gpu": gpu, "machine": machine, "origin": f"{origin}\n\n"}
    return [row | common | {"words": WORDS.get(row.get("side"))} for row in rows if where.items() <= row.items()]


def side_of(row: Record, side: str) -> Record:
    """Return one side of a row as a record. The subject may be "MODEL BATCHxTOKENS, SIZE OF THE CACHE, GPU time"."""
    subject = row["subject"].removesuffix(f", {GPU_TIME}")
    what, _, setting = subject.partition(", ")
    time, ours = (digits(row["median"][each]) for each in (side, OURS))
    ratio, noise = row["ratio"].get(side), max(row["noise"][side], row["noise"][OURS])
    speedup = times(ratio, noise) if ratio else "check failed" * (side in row["ratio"])
    peak = row["notes"].get(f"peak memory, {side}") or row["notes"].get("peak memory", "0 GiB")
    return row | row["sizes"] | {
        "side": side, "subject": subject, "what": what, "setting": setting or "no cache", "ours": ours,
        "speedup": speedup, "compared": f"{time} ({speedup})" if speedup else time,
        "clock": WALL_TIME if subject == row["subject"] else GPU_TIME, "peak_gib": float(peak.partition(" ")[0]),
    }  # fmt: skip


def times(ratio: float, noise: float) -> str:
    """Format a ratio, or return ≈1 if the larger time exceeds the smaller one by no more than the noise."""
    return f"{ratio:.2f}×" if max(ratio, 1 / ratio) - 1 > noise else "≈1"


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def pivot(
    found: Iterable[Record],
    rows: dict[str, str],
    columns: dict[str, str] | None = None,
    behind: int = 0,
    joint: str = " / ",
) -> str:
    """Return a Markdown table with a row per distinct key, and a column per distinct heading, below the records' origins.

    Args:
        rows: heading -> format of a record, for the columns of the key.
        columns: format of a heading -> format of a cell. ``joint`` joins several cells of the same row and heading.
        behind: how many columns of the key stand behind the cells, on the right.
    """
    columns, found, table = columns or {}, list(found), dict[tuple[str, ...], dict[str, list[str]]]()
    headings = dict.fromkeys(heading.format_map(record) for heading in columns for record in found)
    for record in found:
        cells = table.setdefault(tuple(key.format_map(record) for key in rows.values()), {})
        for heading, cell in columns.items():
            cells.setdefault(heading.format_map(record), []).append(cell.format_map(record))
    parts = [(key, [joint.join(cells.get(each, ())) for each in headings]) for key, cells in table.items()]
    body = [
        [*key[: len(key) - behind], *cells, *key[len(key) - behind :]] for key, cells in [([*rows], headings), *parts]
    ]
    head, *lines = ("| " + " | ".join(line).replace("|  ", "| ") + " |" for line in body)
    rule = "|" + "---|" * (len(rows) + len(headings))
    origins = "".join(dict.fromkeys(record.get("origin", "") for record in found))
    return origins + re.sub(r"(\d)x(\d)", r"\1×\2", "\n".join([head, rule, *lines]))


def speedups(name: str, ours: str, other: str) -> list[Record]:
    """Return how many times as fast one side of a data file is as another, by length and clock.

    A file may have a single round, so GPU_NOISE applies. WALL_NOISE is large, because the median of a step that waits for Python
    differed by as much between two runs.
    """
    found, theirs = [], {row["tokens"]: row for row in records(name, side=other)}
    for row, base in ((row, theirs[row["tokens"]]) for row in records(name, side=ours) if row["tokens"] in theirs):
        for clock, field, noise in ((WALL_TIME, "wall", WALL_NOISE), (GPU_TIME, "gpu", GPU_NOISE)):
            noise = max(noise, *(each["gpu_spread"] for each in (row, base))) if field == "gpu" else noise
            found.append(row | {"clock": clock, "speedup": times(base[f"{field}_ms"] / row[f"{field}_ms"], noise)})
    return found


def rollouts(ours: str, other: str) -> list[Record]:
    """Return how many times as fast one side generates as another, by number of sequences."""
    theirs = {row["batch"]: row for row in records("rollouts", side=other, what="generate")}
    return [
        row | {"clock": WALL_TIME, "speedup": times(row["tokens_s"] / theirs[row["batch"]]["tokens_s"], WALL_NOISE)}
        for row in records("rollouts", side=ours, what="generate")
    ]


BILLIONS = {"Qwen3-30B-A3B": 30.53, "gpt-oss-20b": 20.9, "Gemma-4-26B-A4B": 25.2, "GLM-4.5-Air": 106.9}  # parameters
PACKED_BYTES = 1 / 2 + 1 / 64 + 4 / 64 / 256  # per weight: the code, absmax in 8 bits, and its nested absmax
ALL = {"offload": "all", "rank": 16, "attention_only": False, "tokens": 2048}  # all packed experts in host memory


def offload(**where: Any) -> list[Record]:
    """Return the timed steps of whole mixtures, with sizes in GB (10^9 bytes).

    ``dense_experts_gb`` is the size of the experts of ``in_host`` in 16 bits. Two thirds of it, ``gate_up_gb``, are ``gate_up_proj``.
    """
    return [
        run | {
            "dense_gb": 2 * BILLIONS[run["model"]], "packed_gb": (run["loaded"] + run["in_host"]) / 1e9,
            "experts_gb": run["in_host"] / 1e9, "adapters_gb": run["adapters_held"] / 1e9,
            "loading_gb": run["peak_loading"]["reserved"] / 1e9, "training_gb": run["peak"]["reserved"] / 1e9,
            "dense_experts_gb": (dense := run["in_host"] / PACKED_BYTES * 2 / 1e9),
            "gate_up_gb": (gate_up := dense * 2 / 3),
            "merge_gb": 2 * BILLIONS[run["model"]] + gate_up,
            # a cap leaves out half a GB, which CUDA itself takes
            "card_gb": run["cap"] * 2**30 / 1e9 + 0.5 if run["cap"] else run["gpu_bytes"] / 1e9,
            "bus_ms": run["fetched"] / run["bus"] * 1e3,
            "lora": "attention" if run["attention_only"] else "attention, experts",
        }
        for model in BILLIONS for run in records("offload", **{"model": model} | where) if "gpu_ms" in run
    ]  # fmt: skip


def figure(text: str, **where: Any) -> str:
    """Format the first timed step of a mixture: of Qwen3-30B-A3B with all experts in host memory, but for ``where``."""
    return text.format_map(offload(**{"model": "Qwen3-30B-A3B"} | ALL | where)[0])


LIGER, CACHE = "and `use_liger_kernel=True`", '`enable(cache="auto")`'
STATIC = '`enable(matmul="auto", graphs="auto")` and `cache_implementation="static"`'
OFFLOADING = "unsloth, offloading, graphs", "unsloth, offloading"  # Unsloth's own checkpoint, its default
GAINS: list[tuple[str, str, str, Callable[[], list[Record]]]] = [  # what is trained, what to type, compared with, records
    ("a mixture, LoRA on experts", f'`enable(experts="4bit", lora="fused", graphs="auto")` {LIGER}', "peft, experts in 16 bits",
     partial(speedups, "recipe-moe", "graphs", "16-bit experts")),
    ("the same mixture", "the same", "Unsloth", partial(speedups, "recipe-moe", "graphs", "unsloth")),
    ("a dense model, TRL", f'`enable(lora="fused", graphs="auto")` {LIGER}', "a plain script",
     partial(speedups, "recipe-16", "graphs", "peft")),
    ("the same dense model", "the same", "Unsloth", partial(speedups, "recipe-16", "graphs", "unsloth")),
    ("Unsloth, a dense model", '`enable(graphs="auto")`', "no patch",
     partial(speedups, "recipe-16", *OFFLOADING)),
    ("`generate()` with LoRA, 8 / 32 sequences", STATIC, "Unsloth", partial(rollouts, "graphs", "unsloth")),
    ("peft or TRL", "`enable()`", "no patch", partial(speedups, "recipe", "patch", "peft")),
    ("Llama-3.2-1B, TRL", f'`enable(lora="fused", graphs="auto")` {LIGER}', "a plain script",
     partial(speedups, "recipe-1b", "graphs", "peft")),
    ("Llama-3.2-1B", "the same", "Unsloth", partial(speedups, "recipe-1b", "graphs", "unsloth")),
    ("Unsloth, a mixture", '`enable(graphs="auto")`', "no patch", partial(speedups, "recipe-moe", *OFFLOADING)),
    ("peft or TRL, memory to spare", CACHE, "no patch", partial(speedups, "step-trl", "peft, patch, cached", "peft")),
    ("`generate()` with LoRA, 8 / 32 sequences", STATIC, "bitsandbytes, peft",
     partial(rollouts, "graphs", "bitsandbytes and peft")),
    ("4-bit generation, compiled, 1 / 8 / 32 sequences", '`enable(matmul="auto")`', "bitsandbytes",
     partial(records, "generate", side="stock", setting="compiled")),
]  # fmt: skip


def gains(count: int | None = None) -> str:
    """Return the table of the first ``count`` rows of GAINS, or of all."""
    found = (record | {"gain": gain, "origin": ""} for gain in GAINS[:count] for record in gain[-1]())
    rows = {"training": "{gain[0]}", "compared with": "{gain[2]}", "GPU": "{gpu}", "what to type": "{gain[1]}"}
    return pivot(found, rows, {"{clock}": "{speedup}"}, behind=2)


def requirements() -> str:
    """Return the releases of a measured step as requirements of pip."""
    gpu, machine = itemgetter("gpu", "machine")(records("recipe")[0])
    wanted = {*RELEASES, "wrapt"} - {"unsloth"}
    pins = [f"{name}=={release.partition('+')[0]}" for name, release in machine["releases"].items() if name in wanted]
    return "\n".join([f"These releases were tested together on an {gpu}:\n\n```text", *pins, "packaging", "click\n```"])


def sample_of_doctor() -> str:
    """Return the first lines of ``nf4-patch doctor`` for the GPU and the releases of a measured step."""
    gpu, machine = itemgetter("gpu", "machine")(records("recipe")[0])
    installed = {name: release for name, release in machine["releases"].items() if not name.startswith("unsloth")}
    lines = doctor.lines_to_type(installed, [divmod(int(machine["capability"]), 10)])
    text = "\n".join(doctor.DoctorReport("", installed, [], "", [], [], [], lines).render())
    return f"On an {gpu} it says:\n\n```text\n{text.partition('nf4_patch ')[0].strip()}\n...\n```"


def install() -> str:
    """Return the installation command, and with a repository in pyproject.toml, a badge that opens the notebook."""
    (repository,) = re.findall(r'^repository = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if not repository:
        return "```bash\npip install .    # in a clone, because nf4_patch is not on PyPI\n```"
    notebook = repository.replace("https://github.com", "https://colab.research.google.com/github")
    badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    return f"```bash\npip install git+{repository}\n```\n\n{badge}({notebook}/blob/main/examples/t4_colab.ipynb)"


def sides(name: str, heading: str, **where: Any) -> str:
    """Return the table of a benchmark with a row per subject and a column per side."""
    found = [record for record in records(name, **where) if "fp16" not in record["subject"]]
    return pivot(sorted(found, key=itemgetter("nbytes")), {heading: "{subject}"}, {"{side}": "{compared}"})


UNBROKEN = "\u00a0/\u00a0"  # in one line of a cell
STEP, STEPS = "ms, wall-clock time / GPU time", {"{tokens:,} tokens": f"{{wall_ms:.1f}}{UNBROKEN}{{gpu_ms:.1f}}"}
CHECKPOINTS = {  # Unsloth's sides by checkpoint: PyTorch's, and Unsloth's, which moves inputs of layers to host memory
    "unsloth": "`True`", "unsloth, graphs": '`True`, `enable(graphs="auto")`', "unsloth, offloading": '`"unsloth"`',
    "unsloth, offloading, graphs": '`"unsloth"`, `enable(graphs="auto")`',
}  # fmt: skip
GRAPHS = {side: WORDS[side] for side in ("unsloth", "unsloth, graphs", "unsloth, block graphs")}
ROLLOUTS = {"patch": '`enable(matmul="auto")`', "graphs": '`enable(matmul="auto", graphs="auto")`, static cache'}
GRPO = ROLLOUTS | {"graphs": '`enable(matmul="auto", graphs="auto", lora="fused")`, static cache'}
GRAPHS |= {"fused": "without graphs", "graphs": '`graphs="auto"`'}


def steps(name: str, row: str, memory: str) -> str:
    """Return the table of a training step with a row per side."""
    return pivot(records(name), {STEP: row}, STEPS | {"GiB": memory}, joint=UNBROKEN)


BLOCKS: dict[str, Callable[[], str]] = {
    "install": install,
    "doctor": sample_of_doctor,
    "requirements": requirements,
    "releases": lambda: pivot(
        (run | dict.fromkeys((*RELEASES, "wrapt"), "") | run["releases"] for run in load("releases.json")),
        {"on": "{place}", "run": "{cell}", **{name: f"{{{name}}}" for name in (*RELEASES, "wrapt")},
         "result": "{result}"}),
    "first-gains": partial(gains, 7),
    "gains": gains,
    "dequantize": partial(sides, "bench", "µs", section="dequantize"),
    "dequantize-matmul": partial(sides, "bench", "µs", section="dequantize + matmul"),
    "host": partial(sides, "bench", "µs", section="host"),
    "challenge": partial(sides, "challenge", "s", subject="total"),
    "generation": partial(sides, "generate", "tokens/s"),
    "generation-lora": lambda: pivot(
        sorted((row for row in records("generation-lora") if "tokens_s" in row), key=itemgetter("batch")),
        {"tokens per second": "{words}, {layers} {code} layers"}, {"batch {batch}": "{tokens_s:,.0f}"}),
    "matmul": lambda: pivot(
        records("matmul", side="bitsandbytes"), {"rows of X": "{m}"}, {"{section}": "{ours} ({speedup})"}),
    "cache": lambda: pivot(
        records("step-cache", side="unpatched"),
        {"model, tokens": "{what}"}, {"{setting}": "{speedup}, {peak_gib:.1f} GiB"}),
    "experts-4bit": lambda: pivot(
        records("step-experts-4bit", section="frozen experts"),
        {"ms, GiB": "{what}"}, {"{side}": "{compared}, {peak_gib:.1f}"}),
    "graphs": lambda: pivot(
        [row | {"words": GRAPHS[row["side"]]} for name in ("recipe-1b", "recipe", "recipe-16", "recipe-moe")
         for row in records(name) if row["side"] in GRAPHS],
        {STEP: "{model}, {layers} layers: {words}"}, STEPS),
    "lengths": lambda: pivot(
        [row | {"words": GRAPHS[row["side"]], "to": "not set" if row["pad_to"] == 1 else f"`{row['pad_to']}`"}
         for row in records("lengths")],
        {"`pad_to_multiple_of=`": "{to}", "different lengths": "{lengths}", "ms per step": "{words}"}, {"epoch {epoch}": "{step_ms:.1f}"}),
    "unsloth-checkpoint": lambda: pivot(
        [row | {"words": CHECKPOINTS[row["side"]]} for name in ("recipe", "recipe-16", "recipe-moe")
         for row in records(name) if row["side"] in CHECKPOINTS],
        {f"`use_gradient_checkpointing=`, {STEP}": "{model}, {layers} layers: {words}"}, STEPS | {"GiB": "{reserved_gib:.1f}"}, joint=UNBROKEN),
    **{key: partial(steps, key, "{side}", "{peak_gib:.2f}") for key in ("step-trl", "step-compiled")},
    **{key: partial(steps, key, "{words}", "{reserved_gib:.1f}") for key in ("recipe", "recipe-16", "recipe-1b", "recipe-moe")},
    "rollouts": lambda: pivot(
        [row | {"words": ROLLOUTS.get(row["side"], row["words"])} for row in records("rollouts", what="generate")],
        {"tokens per second, wall-clock": "{words}"}, {"{batch} sequences": "{tokens_s:,.0f}"}),
    "grpo": lambda: pivot(
        [row | {"words": GRPO.get(row["side"], row["words"])} for row in records("rollouts", what="grpo")],
        {"seconds": "{words}", "a step": "{step_s:.2f}", "rollout": "{generation_s:.2f}", "rest of the step": "{rest_s:.2f}"}),
    "every-mixture": lambda: pivot(
        ({"name": name, **row} for name, row in sorted(load("mixtures.json")["mixtures"].items())),
        {"packed": "{packed}", "saved and loaded": "{reload}", "merged": "{merge}", "dequantized and saved": "{export}",
         "LoRA with the usual `target_modules`": "{tutorial}", "LoRA with `target_parameters`": "{parameters}"},
        {"folders of transformers.models": "{name}"}),
    "mixtures-memory": lambda: pivot(offload(**ALL), {
        "GB": "{model}", "model in 16 bits": "{dense_gb:.0f}", "packed model": "{packed_gb:.0f}",
        "packed experts": "{experts_gb:.1f}", "adapters in bf16": "{adapters_gb:.1f}",
        'peak of a step with `offload="all"`': "{training_gb:.1f}"}),
    "offload": lambda: pivot(offload(), {
        "model, tokens": "{model}, {tokens:,}", "LoRA on": "{lora}, r = {rank}", "optimizer": "{optimizer}",
        "GPU, GB": "{card_gb:.0f}", "`offload=`": '`"{offload}"`', "step, ms": "{gpu_ms:.0f}",
        "kernels alone, ms": "{kernels_ms:.0f}", "bus alone, ms": "{bus_ms:.0f}",
        "peak loading, GB": "{loading_gb:.1f}", "peak training, GB": "{training_gb:.1f}",
        "in host memory, GB": "{experts_gb:.1f}"}),
    "wait": lambda: " ms instead of ".join(
        f"{row['wall_ms']:.0f}" for side in ("graphs", "fused") for row in records("recipe", side=side, tokens=512)),
    "packed-gb": partial(figure, "{packed_gb:.0f} GB"),
    "packed-qwen": partial(figure, "{packed_gb:.0f} GB instead of {dense_gb:.0f}"),
    "host-qwen": partial(figure, "{experts_gb:.1f} GB", offload="3GiB"),
    "dense-qwen": partial(figure, "{dense_gb:.0f} GB"),
    "experts-qwen": partial(figure, "{dense_experts_gb:.0f} GB"),
    "split-qwen": partial(figure, "{gate_up_gb:.0f} GB"),
    "merge-qwen": partial(figure, "{merge_gb:.0f} GB"),
    "resident-qwen": partial(figure, "{training_gb:.1f} GB", offload="off"),
    "card-qwen": partial(figure, "{card_gb:.0f} GB", offload="3GiB"),
    "card-glm": partial(figure, "{card_gb:.0f} GB", model="GLM-4.5-Air"),
    "targets": lambda: pivot(
        ({"t": t, "name": t.name.removeprefix(f"{t.library}."), "tested": ", ".join(t.tested)} for t in TARGETS),
        {"library": "{t.library} {t.releases}", "replaced function: what it covers": "`{name}`: {t.covers}",
         "tested with": "{tested}"}),
    "reasons": lambda: pivot(
        ({"r": reason, "expected": "yes" * reason.is_expected} for reason in Reason),
        {"reason": "`{r.name}`", "meaning": "{r.sentence}", "what to do": "{r.advice}", "expected": "{expected}"}),
    "variables": lambda: pivot(
        ({"v": v, "values": ", ".join(v.values), "default": f"`{v.default}`" if v.default else "unset"}
         for v in VARIABLES),
        {"variable": "`{v.name}`", "values": "{values}", "default": "{default}", "meaning": "{v.meaning}"}),
    "commands": lambda: pivot(
        ({"name": name, "summary": verb.get_short_help_str(200)} for name, verb in cli.main.commands.items()),
        {"command": "`nf4-patch {name}`", "": "{summary}"}),
}  # fmt: skip
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PART = re.compile(r"<!-- ([\w-]+)(: generated)? -->.*?<!-- /\1 -->", re.DOTALL)


def part(match: re.Match[str]) -> str:
    """Return a generated part of a page, up to date."""
    name, table = match.groups(default="")
    newline = "\n" * bool(table)
    return f"<!-- {name}{table} -->{newline}{BLOCKS[name]()}{newline}<!-- /{name} -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, list outdated pages")
    check = parser.parse_args(arguments).check
    outdated = {page: new for page in PAGES if (new := PART.sub(part, page.read_text())) != page.read_text()}
    for page, text in outdated.items():
        print("outdated:" if check else "written:", page.relative_to(ROOT))
        if not check:
            page.write_text(text)
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
