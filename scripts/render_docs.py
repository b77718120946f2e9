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
GPUS = ("H100", "H200")
OURS = "nf4_patch"
RELEASES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")
Record = dict[str, Any]


def sources() -> dict[str, str]:
    """Return data file -> the command that writes it. GPU in the name of a file stands for h100 or h200."""
    return dict(re.findall(r"^\| `([\w.-]+\.json)` \| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def records(name: str, **where: Any) -> list[Record]:
    """Return the records of NAME-GPU.json that have the values of ``where``. The first GPU with such a file counts."""
    files = ((gpu, f"{name}-{gpu.lower()}.json") for gpu in GPUS)
    gpu, file = next(((gpu, file) for gpu, file in files if (DATA / file).exists()), ("", ""))
    data = load(file) if file else {}
    rows = [row | {"words": WORDS.get(row.get("side"), row.get("side"))} for row in data.get("rows", ())]
    for section, timed in data.get("sections", {}).items():
        for row in timed:
            sides = sorted(row["median"], key=lambda side: side != OURS)
            rows += [side_of(row, side) | {"section": section} for side in sides]
    found = (row | {"gpu": gpu, "file": file, "machine": data["machine"]} for row in rows)
    return [record for record in found if all(record.get(field) == value for field, value in where.items())]


def side_of(row: Record, side: str) -> Record:
    """Return one side of a row as a record. The subject may be "MODEL BATCHxTOKENS, SIZE OF THE CACHE, GPU time"."""
    subject = row["subject"].removesuffix(f", {GPU_TIME}")
    what, _, setting = subject.partition(", ")
    time, ours = (digits(row["median"][each]) for each in (side, OURS))
    ratio, noise = row["ratio"].get(side), max(row["noise"][side], row["noise"][OURS])
    speedup = times(ratio, noise) if ratio else "check failed" * (side in row["ratio"])
    peak = row["notes"].get(f"peak memory, {side}") or row["notes"].get("peak memory", "0 GiB")
    return row | {
        "side": side, "subject": subject, "what": what, "setting": setting or "no cache", "m": row["sizes"].get("m"),
        "ours": ours, "time": time, "speedup": speedup, "compared": f"{time} ({speedup})" if speedup else time,
        "clock": WALL_TIME if subject == row["subject"] else GPU_TIME, "peak_gib": float(peak.partition(" ")[0]),
    }  # fmt: skip


def times(ratio: float, noise: float) -> str:
    return f"{ratio:.2f}×" if abs(ratio - 1) > noise else "≈1"


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def pivot(found: Iterable[Record], rows: dict[str, str], columns: dict[str, str] | None = None) -> str:
    """Return a Markdown table with a row per distinct key, and a column per distinct heading.

    Args:
        rows: heading -> format of a record, for the columns of the key.
        columns: format of a heading -> format of a cell. Several cells of the same row and heading are joined.
    """
    columns, found, table = columns or {}, list(found), dict[tuple[str, ...], dict[str, list[str]]]()
    headings = dict.fromkeys(heading.format_map(record) for heading in columns for record in found)
    for record in found:
        cells = table.setdefault(tuple(key.format_map(record) for key in rows.values()), {})
        for heading, cell in columns.items():
            cells.setdefault(heading.format_map(record), []).append(cell.format_map(record))
    body = [[*key, *(" / ".join(cells.get(each, ())) for each in headings)] for key, cells in table.items()]
    head, *lines = ("| " + " | ".join(line).replace("|  ", "| ") + " |" for line in ([*rows, *headings], *body))
    rule = "|" + "---|" * (len(rows) + len(headings))
    return re.sub(r"(\d)x(\d)", r"\1×\2", "\n".join([head, rule, *lines]))


def measured(found: list[Record], rows: dict[str, str], columns: dict[str, str] | None = None) -> str:
    """Return the pivot below a line with the GPU, the data file and the releases."""
    if not found:
        return "Not measured yet."
    gpu, file, machine = itemgetter("gpu", "file", "machine")(found[0])
    releases = ", ".join(f"{name} {machine['releases'][name]}" for name in RELEASES if name in machine["releases"])
    heading = f"**{gpu}** ([{file}](data/{file}) of {machine['date']} with {releases}):"
    return f"{heading}\n\n{pivot(found, rows, columns)}"


# --- what is gained ---

GPU_TIME, WALL_TIME = "GPU time", "wall-clock time"
LENGTHS = {512, 2048, 4096}  # tokens per step
LEAST = 0.02  # smaller differences are called noise, because a file may have a single round


def speedups(name: str, ours: str, other: str, **where: Any) -> list[Record]:
    """Return how many times as fast one side of a data file is as another, by clock and length."""
    found = []
    theirs = {row["tokens"]: row for row in records(name, side=other, **where)}
    for clock, field, tolerance in ((GPU_TIME, "gpu", 1), (WALL_TIME, "wall", 2)):  # wall-clock times vary between runs
        for row in records(name, side=ours, **where):
            if row["tokens"] in theirs.keys() & LENGTHS:
                base = theirs[row["tokens"]]
                noise = max(LEAST, *(tolerance * each[f"{field}_spread"] for each in (row, base)))
                found.append(row | {"clock": clock, "speedup": times(base[f"{field}_ms"] / row[f"{field}_ms"], noise)})
    return found


CACHE, LIGER = '`enable(cache="auto")`', "and `use_liger_kernel=True`"
# what is trained, what to type, what that is compared with, and records
GAINS: list[tuple[str, str, str, Callable[[], list[Record]]]] = [
    ("a mixture, LoRA on experts", f'`enable(experts="4bit", lora="fused")` {LIGER}', "peft, experts in 16 bits",
     lambda: speedups("recipe-moe", "fused", "16-bit experts")),
    ("the same mixture, graphs", f'`enable(experts="4bit", lora="fused", graphs="auto")` {LIGER}', "Unsloth",
     lambda: speedups("recipe-moe", "graphs", "unsloth")),
    ("a dense model, TRL, graphs", f'`enable(lora="fused", graphs="auto")` {LIGER}', "Unsloth",
     lambda: speedups("recipe", "graphs", "unsloth")),
    ("peft or TRL", "`enable()`", "no patch",
     lambda: speedups("recipe", "patch", "peft")),
    ("Unsloth 2026.10 or newer, PyTorch ≥ 2.11", CACHE, "no patch",
     lambda: speedups("step-trl", "unsloth, patch, cached", "unsloth")),
    ("peft or TRL, memory to spare", CACHE, "no patch", lambda: speedups("step-trl", "peft, patch, cached", "peft")),
    ("4-bit generation, compiled, 1 / 8 / 32 sequences", '`enable(matmul="auto")`', "bitsandbytes",
     lambda: records("generate", side="stock", setting="compiled")),
]  # fmt: skip


def gains(count: int | None = None) -> str:
    """Return the table of the first ``count`` rows of GAINS, or of all."""
    found = (record | {"gain": gain} for gain in GAINS[:count] for record in gain[-1]())
    rows = {"training": "{gain[0]}", "what to type": "{gain[1]}", "compared with": "{gain[2]}", "GPU": "{gpu}"}
    return pivot(found, rows, {"{clock}": "{speedup}"})


# --- records of their own ---

PARAMETERS = {"Qwen3-30B-A3B": 30.53e9, "gpt-oss-20b": 20.9e9, "Gemma-4-26B-A4B": 25.2e9, "GLM-4.5-Air": 106.9e9}


def offload(**where: Any) -> list[Record]:
    """Return the timed steps of whole mixtures, with sizes in GB (10^9 bytes)."""
    runs = [run for model in PARAMETERS for run in records("offload", model=model) if "gpu_ms" in run]
    for run in runs:
        sizes = {
            "dense": 2 * PARAMETERS[run["model"]], "packed": run["loaded"] + run["in_host"], "experts": run["in_host"],
            "adapters": run["adapters_held"], "loading": run["peak_loading"]["reserved"],
            "training": run["peak"]["reserved"],
            "card": (run["cap"] * 2**30 or 79.5e9) + 0.5e9,  # CUDA itself takes half a GB
        }  # fmt: skip
        run |= {f"{name}_gb": size / 1e9 for name, size in sizes.items()}
        run["bus_ms"] = run["fetched"] / run["bus"] * 1e3
        run["lora"] = "attention" if run["attention_only"] else "attention, experts"
    return [run for run in runs if where.items() <= run.items()]


ALL = {"offload": "all", "rank": 16, "attention_only": False, "tokens": 2048}  # all packed experts in host memory
QWEN = {"model": "Qwen3-30B-A3B", **ALL}


def figure(text: str, **where: Any) -> str:
    """Format the first timed step of a mixture with the values of ``where``."""
    return text.format_map(offload(**where)[0])


def trained() -> Record:
    """Return a measured training step, for its GPU and releases."""
    return records("recipe")[0]


def requirements() -> str:
    """Return the releases of a measured step as requirements of pip."""
    wanted = {*RELEASES, "wrapt"} - {"unsloth"}
    installed = trained()["machine"]["releases"].items()
    pins = [f"{name}=={release.partition('+')[0]}" for name, release in installed if name in wanted]
    return "\n".join([f"These releases were tested together on an {trained()['gpu']}:\n\n```text", *pins, "click\n```"])


def sample_of_doctor() -> str:
    """Return the first lines of ``nf4-patch doctor`` for the GPU and the releases of a measured step."""
    machine = trained()["machine"]
    installed = {name: release for name, release in machine["releases"].items() if not name.startswith("unsloth")}
    capability = divmod(int(machine["capability"]), 10)
    gpu = doctor.Gpu(0, machine["gpu"], capability, 80.0)
    lines = doctor.lines_to_type(installed, False, [capability])
    text = "\n".join(doctor.DoctorReport("", installed, [gpu], "", [], [], [], lines).render())
    return f"On an {trained()['gpu']} it says:\n\n```text\n{text.partition('GPU 0')[0].strip()}\n...\n```"


def install() -> str:
    """Return the installation command, and with a repository in pyproject.toml, a badge that opens the notebook."""
    (repository,) = re.findall(r'^repository = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if not repository:
        return "```bash\npip install .    # in a clone, because nf4_patch is not on PyPI\n```"
    notebook = repository.replace("https://github.com", "https://colab.research.google.com/github")
    badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    return f"```bash\npip install git+{repository}\n```\n\n{badge}({notebook}/blob/main/examples/t4_colab.ipynb)"


# --- the tables and figures by name ---

WORDS = {  # side of the data -> row of a table
    "peft": "a plain TRL script", "16-bit experts": "a plain TRL script, experts in 16 bits", "patch": "the patch",
    "liger": "+ `use_liger_kernel=True`", "fused": '+ `lora="fused"`', "graphs": '+ `graphs="auto"`',
    "cache": '+ `cache="auto"` with room for every weight', "fused optimizer": '+ `optim="adamw_torch_fused"`',
    "paged optimizer": 'the same with `optim="paged_adamw_8bit"`', "unsloth": "Unsloth",
    "unsloth, fused optimizer": 'Unsloth, `optim="adamw_torch_fused"`',
    "unsloth, block graphs": "Unsloth, `UNSLOTH_BLOCK_CUDAGRAPHS=1`",
    "bnb": "bitsandbytes and peft", "enable": "`enable()`", "auto": '`enable(matmul="auto")`',
    "bnb plain": "bitsandbytes, no adapter", "enable plain": "`enable()`, no adapter",
    "auto plain": '`enable(matmul="auto")`, no adapter', "dense": "adapter merged into 16-bit weights",
}  # fmt: skip
GRAPHS = {"fused": "without graphs", "graphs": '`graphs="auto"`'} | {
    side: words for side, words in WORDS.items() if side in ("unsloth", "unsloth, block graphs")
}
STEP, STEPS = "ms, wall-clock time / GPU time", {"{tokens:,} tokens": "{wall_ms:.1f}\u00a0/\u00a0{gpu_ms:.1f}"}


def sides(name: str, heading: str, **where: Any) -> str:
    """Return the table of a benchmark with a row per subject and a column per side."""
    found = [record for record in records(name, **where) if "fp16" not in record["subject"]]
    return measured(sorted(found, key=itemgetter("nbytes")), {heading: "{subject}"}, {"{side}": "{compared}"})


def decoded() -> list[Record]:
    """Return the decode steps with an adapter, by batch. Rows that the benchmark itself wrote have no ``code``."""
    rows = (row for row in records("generation-lora") if "tokens_s" in row)
    rows = ({"layers": "", "code": "compiled" if row.get("row") == "compiled" else "eager", **row} for row in rows)
    return sorted(rows, key=itemgetter("batch"))


def steps(name: str, row: str, memory: str) -> str:
    """Return the table of a training step with a row per side."""
    return measured(records(name), {STEP: row}, STEPS | {"GiB, {tokens:,}": memory})


BLOCKS: dict[str, Callable[[], str]] = {
    "install": install,
    "doctor": sample_of_doctor,
    "requirements": requirements,
    "releases": lambda: pivot(
        (run | dict.fromkeys((*RELEASES, "wrapt"), "") | run["releases"] for run in load("releases.json")),
        {"on": "{place}", "run": "{cell}", **{name: f"{{{name}}}" for name in (*RELEASES, "wrapt")},
         "result": "{result}"}),
    "first-gains": partial(gains, 5),
    "gains": gains,
    "dequantize": partial(sides, "bench", "µs", section="dequantize"),
    "dequantize-matmul": partial(sides, "bench", "µs", section="dequantize + matmul"),
    "host": partial(sides, "bench", "µs", section="host"),
    "challenge": partial(sides, "challenge", "s", subject="total"),
    "generation": partial(sides, "generate", "tokens/s"),
    "generation-lora": lambda: measured(
        decoded(), {"tokens per second": "{words}, {layers} {code} layers"}, {"batch {batch}": "{tokens_s:,.0f}"}),
    "matmul": lambda: measured(
        records("matmul", side="bitsandbytes"), {"rows of X": "{m}"}, {"{section}": "{ours} ({speedup})"}),
    "cache": lambda: measured(
        records("step-cache", side="unpatched"),
        {"model, tokens": "{what}"}, {"{setting}": "{speedup}, {peak_gib:.1f} GiB"}),
    "experts-4bit": lambda: measured(
        records("step-experts-4bit", section="frozen experts"),
        {"ms, GiB": "{what}"}, {"{side}": "{compared}, {peak_gib:.1f}"}),
    "graphs": lambda: measured(
        [row | {"words": GRAPHS[row["side"]]} for row in records("recipe") + records("recipe-moe") if row["side"] in GRAPHS],
        {STEP: "{model}, {layers} layers: {words}"}, STEPS),
    **{key: partial(steps, key, "{side}", "{peak_gib:.2f}") for key in ("step-trl", "step-moe-trl", "step-compiled")},
    **{key: partial(steps, key, "{words}", "{reserved_gib:.1f}") for key in ("recipe", "recipe-moe")},
    "every-mixture": lambda: pivot(
        ({"name": name, **row} for name, row in sorted(load("mixtures.json")["mixtures"].items())),
        {"packed": "{packed}", "saved and loaded": "{reload}", "merged": "{merge}", "dequantized and saved": "{export}",
         "LoRA with the usual `target_modules`": "{tutorial}", "LoRA with `target_parameters`": "{parameters}"},
        {"folders of transformers.models": "{name}"}),
    "mixtures-memory": lambda: measured(offload(**ALL), {
        "GB": "{model}", "model in 16 bits": "{dense_gb:.0f}", "packed model": "{packed_gb:.0f}",
        "packed experts": "{experts_gb:.1f}", "adapters in bf16": "{adapters_gb:.1f}",
        'peak of a step with `offload="all"`': "{training_gb:.1f}"}),
    "offload": lambda: measured(offload(), {
        "model, tokens": "{model}, {tokens:,}", "LoRA on": "{lora}, r = {rank}", "optimizer": "{optimizer}",
        "GPU, GB": "{card_gb:.0f}", "`offload=`": '`"{offload}"`', "step, ms": "{gpu_ms:.0f}",
        "kernels alone, ms": "{kernels_ms:.0f}", "bus alone, ms": "{bus_ms:.0f}",
        "peak loading, GB": "{loading_gb:.1f}", "peak training, GB": "{training_gb:.1f}",
        "in host memory, GB": "{experts_gb:.1f}"}),
    "packed-qwen": partial(figure, "{packed_gb:.0f} GB instead of {dense_gb:.0f}", **QWEN),
    "host-qwen": partial(figure, "{experts_gb:.0f} GB", **QWEN),
    "card-qwen": partial(figure, "{card_gb:.0f} GB", **QWEN | {"offload": "3GiB"}),
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


def rendered(text: str) -> str:
    """Return a page with all generated parts up to date."""

    def part(match: re.Match[str]) -> str:
        name, table = match.groups(default="")
        newline = "\n" * bool(table)
        return f"<!-- {name}{table} -->{newline}{BLOCKS[name]()}{newline}<!-- /{name} -->"

    return PART.sub(part, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, list outdated pages")
    check = parser.parse_args(arguments).check
    outdated = {page: new for page in PAGES if (new := rendered(page.read_text())) != page.read_text()}
    for page, text in outdated.items():
        print("outdated:" if check else "written:", page.relative_to(ROOT))
        if not check:
            page.write_text(text)
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
