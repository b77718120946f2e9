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
import itertools
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from nf4_patch.patching.config import VARIABLES
from nf4_patch.patching.option import SWITCH, Variable
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools import advice, cli, doctor

DATA = ROOT / "docs" / "data"
GPUS = ("H200", "H100")
OURS, GPU_TIME, WALL_TIME = "nf4_patch", "GPU time", "wall-clock time"
RELEASES = ("torch", "triton", "bitsandbytes", "unsloth", "transformers", "peft")
WORDS = {  # side of the data -> row of a table
    "peft": "a plain TRL script", "16-bit experts": "a plain TRL script, experts in 16 bits", "patch": "the patch",
    "liger": "+ the patch, `use_liger_kernel=True`", "fused": '+ `lora="fused"`', "graphs": '+ `graphs="auto"`',
    "graphs, no liger": '`lora="fused"`, `graphs="auto"`, without Liger',
    "activations": '+ `activations="16GiB"`', "cache": "+ a cache with room for every weight",
    "paged optimizer": 'every switch, `optim="paged_adamw_8bit"`',
    "unsloth, best": 'Unsloth, `UNSLOTH_BLOCK_CUDAGRAPHS=1`, `checkpoint_skip_layers="max"`',
    "unsloth, offloading": "Unsloth, its own checkpoint",
    "unsloth, offloading, graphs": 'Unsloth, its own checkpoint, `enable(graphs="auto")`',
}  # fmt: skip
NOISE = 0.02  # Smaller differences are called noise, also where the rounds of a run differed by less.
Record = dict[str, Any]


def sources() -> dict[str, str]:
    """Return data file -> the command that writes it. GPU in the name of a file stands for h100 or h200."""
    return dict(re.findall(r"^\| `([\w.-]+\.json)` \| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def records(name: str, **where: Any) -> list[Record]:
    """Return the records of NAME-GPU.json that have the values of ``where``. The first of GPUS with such a file counts.

    The field ``origin`` has the GPU, with the releases if they are not those of ``measured``, and a link to the data file.
    """
    files = {gpu: f"{name}-{gpu.lower()}.json" for gpu in GPUS}
    gpu = next((gpu for gpu, file in files.items() if (DATA / file).exists()), GPUS[0])
    file, data = files[gpu], load(files[gpu])
    rows, machine = data.get("rows", []), data["machine"]
    for section, timed in data.get("sections", {}).items():
        for row in timed:
            names = sorted(row["median"], key=lambda side: side != OURS)
            rows += [side_of(row, side) | {"section": section} for side in names]
    others = "" if releases_of(machine) == usual_releases() else f" with {releases_of(machine)}"
    common = {"gpu": gpu, "machine": machine, "origin": (f"{gpu}{others}", f"[{file}](data/{file})")}
    return [row | common | {"words": WORDS.get(row.get("side"))} for row in rows if where.items() <= row.items()]


def releases_of(machine: Record) -> str:
    return ", ".join(f"{name} {release}" for name, release in machine["releases"].items() if name in RELEASES)


def usual_releases() -> str:
    """Return the releases with which most data files were measured."""
    return Counter(releases_of(machine) for machine in machines()).most_common(1)[0][0]


def machines() -> list[Record]:
    data = [load(file.name) for gpu in GPUS for file in DATA.glob(f"*-{gpu.lower()}.json")]
    return [each["machine"] for each in data if "releases" in each.get("machine", ())]


def measured() -> str:
    """Return the caption of all tables of a page."""
    found = [machine for machine in machines() if releases_of(machine) == usual_releases()]
    first, *_, last = sorted(machine["date"] for machine in [*found, *found])
    return f"from {first} to {last} with {usual_releases()}"


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
    """Return a Markdown table with a row per distinct key and a column per distinct heading.

    The links to the data files are above it.

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
    files = dict[str, dict[str, None]]()
    for machine, link in (record["origin"] for record in found if record.get("origin")):
        files.setdefault(machine, {})[link] = None
    origins = "".join(f"{machine}, {', '.join(links)}:\n\n" for machine, links in files.items())
    return origins + re.sub(r"(\d)x(\d)", r"\1×\2", "\n".join([head, rule, *lines]))


def speedups(name: str, ours: str, other: str) -> list[Record]:
    """Return the speed-up of one side of a data file over another, by length and clock.

    The noise is the larger spread of the two sides in this run, and at least NOISE, because a file may have a single
    round.
    """
    found, theirs = [], {row["tokens"]: row for row in records(name, side=other)}
    for row, base in ((row, theirs[row["tokens"]]) for row in records(name, side=ours) if row["tokens"] in theirs):
        for clock, field in ((WALL_TIME, "wall"), (GPU_TIME, "gpu")):
            noise = max(NOISE, *(each[f"{field}_spread"] for each in (row, base)))
            found.append(row | {"clock": clock, "speedup": times(base[f"{field}_ms"] / row[f"{field}_ms"], noise)})
    return found


def generated(**where: Any) -> list[Record]:
    """Return the rows of ``generate`` with eight layers of Llama. Older rows have no field for the model."""
    rows = records("rollouts", what="generate", layers=8, **where)
    return [row for row in rows if row.get("model", "llama") == "llama"]


def rollouts(ours: str, other: str) -> list[Record]:
    """Return the speed-up of one side's generation over another's, by the number of sequences."""
    theirs = {row["batch"]: row for row in generated(side=other)}
    return [
        row
        | {
            "clock": WALL_TIME,
            "speedup": times(row["tokens_s"] / base["tokens_s"], max(NOISE, row["spread"], base["spread"])),
        }
        for row in generated(side=ours)
        for base in [theirs.get(row["batch"])]
        if base
    ]


BILLIONS = {"Qwen3-30B-A3B": 30.53, "gpt-oss-20b": 20.9, "Gemma-4-26B-A4B": 25.2, "GLM-4.5-Air": 106.9}  # parameters
PACKED_BYTES = 1 / 2 + 1 / 64 + 4 / 64 / 256  # per weight: the code, absmax in 8 bits, and its nested absmax
ALL = {"offload": "all", "rank": 16, "attention_only": False, "tokens": 2048}  # all packed experts in host memory


OFFLOADED = {"model": "Qwen3-30B-A3B", "rank": 16, "attention_only": False, "optimizer": "adamw8bit"}
OFFLOAD = {
    "GPU, GB": "{card_gb:.0f}", "`offload=`": '`"{offload}"`', "step, ms": "{gpu_ms:.0f}",
    "kernels alone, ms": "{kernels_ms:.0f}", "bus alone, ms": "{bus_ms:.0f}",
    "peak loading, GB": "{loading_gb:.1f}", "peak training, GB": "{training_gb:.1f}", "in host memory, GB": "{host_gb:.1f}",
}  # fmt: skip


def in_gb(run: Record) -> Record:
    """Return the sizes of a timed step with ``offload=``, in GB (10^9 bytes), and the time of its copies alone."""
    return {
        "host_gb": run["in_host"] / 1e9, "loading_gb": run["peak_loading"]["reserved"] / 1e9,
        "training_gb": run["peak"]["reserved"] / 1e9, "bus_ms": run["fetched"] / run["bus"] * 1e3,
        # a cap leaves out half a GB, which CUDA itself takes
        "card_gb": run["cap"] * 2**30 / 1e9 + 0.5 if run["cap"] else run["gpu_bytes"] / 1e9,
    }  # fmt: skip


def dense(**where: Any) -> list[Record]:
    """Return the timed steps of whole dense models on a capped GPU, as ``in_gb`` describes them."""
    runs = [run for run in records("offload", **where) if run["model"] not in BILLIONS and run["cap"]]
    return [run | in_gb(run) for run in runs]


def offload(**where: Any) -> list[Record]:
    """Return the timed steps of whole mixtures, with sizes in GB (10^9 bytes).

    ``dense_experts_gb`` is the size of all experts in 16 bits. Two thirds of it, ``gate_up_gb``, are ``gate_up_proj``.
    """
    return [
        run | in_gb(run) | {
            "dense_gb": 2 * BILLIONS[run["model"]], "packed_gb": (run["loaded"] + run["in_host"]) / 1e9,
            "adapters_gb": run["adapters_held"] / 1e9,
            # rows without "experts" are older, and offloaded nothing else
            "experts_gb": (packed := run.get("experts", run["in_host"])) / 1e9,
            "dense_experts_gb": (dense := packed / PACKED_BYTES * 2 / 1e9),
            "gate_up_gb": (gate_up := dense * 2 / 3),
            "merge_gb": 2 * BILLIONS[run["model"]] + gate_up,
        }
        for model in BILLIONS for run in records("offload", **{"model": model} | where) if "gpu_ms" in run
    ]  # fmt: skip


def figure(text: str, **where: Any) -> str:
    """Format the first timed step of a mixture. By default, the mixture is Qwen3-30B-A3B with all experts in host memory.

    ``where`` replaces these settings.
    """
    return text.format_map(offload(**{"model": "Qwen3-30B-A3B"} | ALL | where)[0])


LAYERS = "`lora`, `graphs`, `activations`, Liger"
EXPERTS = f"`experts`, {LAYERS}"
DECODE_GRAPHS = "Unsloth, `UNSLOTH_DECODE_CUDA_GRAPHS=1`"
OFFLOADING = "unsloth, offloading, graphs", "unsloth, offloading"  # Unsloth's own checkpoint, its default
BEST = "Unsloth, its best"
GAINS: dict[str, tuple[str, str, str, Callable[[], list[Record]]]] = {  # key: what runs, what to type, compared with, records
    "mixture": ("mixture, 2 layers, LoRA on experts", EXPERTS, "peft, experts in 16 bits",
                partial(speedups, "recipe-moe", "activations", "16-bit experts")),
    "mixture-unsloth": ("the same mixture", "the same", "Unsloth, its defaults",
                        partial(speedups, "recipe-moe", "activations", "unsloth, offloading")),
    "mixture-best": ("the same mixture", "the same", BEST, partial(speedups, "recipe-moe", "activations", "unsloth, best")),
    "dense-liger": ("dense, 4 layers, TRL with Liger", LAYERS, "the same script, plain `enable()`",
                    partial(speedups, "recipe", "activations", "liger")),
    "dense-unsloth": ("the same dense model", "the same", "Unsloth, its defaults", partial(speedups, "recipe", "activations", "unsloth, offloading")),
    "dense-best": ("the same dense model", "the same", BEST, partial(speedups, "recipe", "activations", "unsloth, best")),
    "dense": ("the same dense model", "the same", "a plain script, without Liger", partial(speedups, "recipe", "activations", "peft")),
    "generation": ("`generate()` with LoRA, 1 / 8 / 32 sequences", "`enable(\"fast\")`, a static cache", DECODE_GRAPHS,
                   partial(rollouts, "fast", "unsloth, decode graphs")),
    "bits": ("dense, 4 layers, peft or TRL", "`enable()`", "no patch", partial(speedups, "recipe", "patch", "peft")),
    "unsloth": ("Unsloth, its defaults, dense, 4 layers", "`graphs`", "no patch", partial(speedups, "recipe", *OFFLOADING)),
    "dense-fast": ("dense, 4 layers, TRL with Liger, memory to spare", f"{LAYERS}, `cache`", "the same script, plain `enable()`",
                   partial(speedups, "recipe", "cache", "liger")),
    "cache": ("the same dense model", "the same", "the same script without `cache`", partial(speedups, "recipe", "cache", "activations")),
    "small": ("Llama-3.2-1B, TRL", LAYERS, BEST, partial(speedups, "recipe-1b", "activations", "unsloth, best")),
    "unsloth-mixture": ("Unsloth, its defaults, mixture, 2 layers", "`graphs`", "no patch",
                        partial(speedups, "recipe-moe", *OFFLOADING)),
}  # fmt: skip


def gains(*keys: str, typed: bool = False) -> str:
    """Return the table of these rows of GAINS. If ``typed``, it has the column "what was on"."""
    rows = {"": "{gain[0]}", "compared with": "{gain[2]}"} | ({"what was on": "{gain[1]}"} if typed else {})
    found = [record | {"gain": GAINS[key], "origin": ""} for key in keys for record in GAINS[key][-1]()]
    (gpu,) = {record["gpu"] for record in found}
    return pivot(found, {heading or f"{gpu}, random weights": form for heading, form in rows.items()},
                 {"{clock}": "{speedup}"}, behind=int(typed))  # fmt: skip


def gain(key: str, where: str = "in wall-clock time") -> str:
    """Return a row of GAINS as words."""
    _, _, other, found = GAINS[key]
    wall = [record for record in found() if record["clock"] == WALL_TIME]
    return f"{' / '.join(record['speedup'] for record in wall)} {where}, compared with {other}"


def peak(share: str, rank: int = 16) -> Callable[[], str]:
    text = f"Qwen3-30B-A3B, LoRA r = {rank}: peak {{training_gb:.1f}} GB"
    return partial(figure, text, offload=share, rank=rank)


EXPECTED: dict[str, Callable[[], str]] = {  # key of an advice -> what to expect
    "dense": lambda: gain("dense-liger"),
    "unsloth": lambda: gain("unsloth"),
    "mixture": lambda: f"{gain('mixture')}. Qwen3-30B-A3B takes {figure('{packed_gb:.0f} GB instead of {dense_gb:.0f}')}",
    "mixture-24": peak("off"), "mixture-16": peak("6GiB"), "mixture-12": peak("3GiB"), "mixture-8": peak("all", 8),
    "old": lambda: "graphs stay off; not measured", "old-unsloth": lambda: "not measured",
    "generation": lambda: gain("generation", "with 1 / 8 / 32 sequences"),
    "bits": lambda: " / ".join(r["speedup"] for r in GAINS["bits"][-1]() if r["clock"] == GPU_TIME) + " in GPU time",
    "none": lambda: "no gain",
}  # fmt: skip


def what_to_type(*keys: str) -> str:
    """Return the table of advice with these keys, or of all advice with what to expect."""
    rows = {"your model": "{model}", "your GPU": "{gpu}", "what to type": "{typed}"}
    shown = [
        row._asdict() | {
            "typed": row.line if row.line == "nothing" else f"`{row.line}`", "expected": EXPECTED[row.key](),
            "also": "the same" if row.also == before.also != "" else
                    ", ".join(f"`{each}`" if "=" in each else each for each in row.also.split(", ") if each),
        }
        for before, row in itertools.pairwise([advice.DENSE._replace(also=""), *advice.TABLE]) if not keys or row.key in keys
    ]  # fmt: skip
    return pivot(shown, rows if keys else rows | {"also set": "{also}", "on an H200": "{expected}"})


def requirements() -> str:
    """Return the releases of a measured step as requirements of pip."""
    gpu, machine = itemgetter("gpu", "machine")(records("recipe")[0])
    wanted = {*RELEASES, "wrapt"} - {"unsloth"}
    pins = [f"{name}=={release.partition('+')[0]}" for name, release in machine["releases"].items() if name in wanted]
    return "\n".join([f"These releases were tested together on an {gpu}:\n\n```text", *pins, "packaging", "click\n```"])


def releases_run() -> str:
    """Return the table of the releases of each library in releases.json."""
    run = [run["releases"] for run in load("releases.json")]
    found = {name: {each[name].partition("+")[0] for each in run if each.get(name)} for name in (*RELEASES, "wrapt")}
    rows = ({"name": name, "releases": ", ".join(sorted(each, key=Version))} for name, each in found.items())
    return pivot(rows, {"library": "{name}", "releases": "{releases}"})


def sample_of_doctor() -> str:
    """Return the first lines of ``nf4-patch doctor`` for the GPU and the releases of a measured step."""
    gpu, machine = itemgetter("gpu", "machine")(records("recipe")[0])
    installed = {name: release for name, release in machine["releases"].items() if not name.startswith("unsloth")}
    capability, memory = divmod(int(machine["capability"]), 10), records("offload")[0]["gpu_bytes"] / 2**30
    lines = doctor.lines_to_type(installed, [doctor.Gpu(0, gpu, capability, memory)])
    text = "\n".join(doctor.DoctorReport("", installed, [], "", [], [], [], lines).render())
    return f"On an {gpu}, `doctor` prints:\n\n```text\n{text.partition('nf4_patch ')[0].strip()}\n...\n```"


def install() -> str:
    """Return the installation command, and with a repository in pyproject.toml, a badge that opens the notebook."""
    (repository,) = re.findall(r'^repository = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    libraries = "bitsandbytes peft transformers trl liger-kernel"
    if not repository:
        return f"```bash\npip install . {libraries}    # in a clone; downloads 5.4 GB\n```"
    notebook = repository.replace("https://github.com", "https://colab.research.google.com/github")
    badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    return f"```bash\npip install git+{repository} {libraries}    # downloads 5.4 GB\n```\n\n{badge}({notebook}/blob/main/examples/t4_colab.ipynb)"


def sides(name: str, heading: str, **where: Any) -> str:
    """Return the table of a benchmark with a row per subject and a column per side."""
    found = sorted(records(name, **where), key=itemgetter("nbytes"))
    return pivot(found, {heading: "{subject}"}, {"{side}": "{compared}"})


def values_of(variable: Variable) -> list[str]:
    """Return the values that a variable allows, without the synonyms of 0 and 1."""
    synonyms = {*SWITCH} - {"0", "1"} if "0" in variable.allowed else ()
    values = [value for value in variable.allowed if value not in synonyms]
    return [*(f"`{value}`" for value in values), *["a size"] * variable.size]


UNBROKEN = "\u00a0/\u00a0"  # in one line of a cell
STEP, STEPS = "ms, wall-clock time / GPU time", {"{tokens:,} tokens": f"{{wall_ms:.1f}}{UNBROKEN}{{gpu_ms:.1f}}"}
# the rows of a table on a page; docs/data/tables.md has the other rows
DENSE_SIDES = ["peft", "liger", "fused", "graphs", "activations", "cache", "unsloth, offloading", "unsloth, best"]
MIXTURE_SIDES = ["16-bit experts", *DENSE_SIDES[1:]]
ROLLOUTS = {
    "bitsandbytes and peft": "bitsandbytes and peft", "patch": '`enable(matmul="auto")`', "graphs": '`enable(matmul="auto", graphs="auto")`, static cache',
    "fast": '`enable("fast")`, static cache', "unsloth, decode graphs": DECODE_GRAPHS,
}  # fmt: skip
GRPO = ROLLOUTS | {"unsloth": "Unsloth's GRPO, its defaults"}
GRAPHS = {
    "fused": "without graphs",
    "graphs": '`graphs="auto"`',
    "flash": "without graphs, `enable_cudnn_sdp(False)`",
}


def steps(row: str, found: Iterable[Record]) -> str:
    """Return the table of a training step. ``row`` is the format of a row's name."""
    return pivot(found, {STEP: row}, STEPS | {"GiB": "{reserved_gib:.1f}"}, joint=UNBROKEN)


def recipes(on_page: bool) -> str:
    """Return the table of the sides of DENSE_SIDES and MIXTURE_SIDES, or of all other sides."""
    return steps("{model}, {layers} layers: {words}", (
        row for name, sides in (("recipe", DENSE_SIDES), ("recipe-moe", MIXTURE_SIDES))
        for row in sorted(records(name), key=lambda row: sides.index(row["side"]) if row["side"] in sides else -1)
        if (row["side"] in sides) is on_page))  # fmt: skip


BLOCKS: dict[str, Callable[[], str]] = {
    "install": install,
    "doctor": sample_of_doctor,
    "requirements": requirements,
    "releases": lambda: pivot(
        (run | dict.fromkeys((*RELEASES, "wrapt"), "") | run["releases"] for run in load("releases.json")),
        {"on": "{place}", "run": "{cell}", **{name: f"{{{name}}}" for name in (*RELEASES, "wrapt")},
         "result": "{result}"}),
    "releases-run": releases_run,
    "first-gains": partial(gains, "mixture", "mixture-best", "dense-liger", "dense-unsloth", "dense-best"),
    "first-advice": partial(what_to_type, "dense", "mixture-24", "mixture-16"),
    "advice": what_to_type,
    "measured": measured,
    "gains": partial(gains, *[*GAINS][:9], typed=True),
    "gains-more": partial(gains, *[*GAINS][9:], typed=True),
    "dequantize": partial(sides, "bench", "µs", section="dequantize"),
    "dequantize-matmul": partial(sides, "bench", "µs", section="dequantize + matmul"),
    "host": partial(sides, "bench", "µs", section="host"),
    "challenge": partial(sides, "challenge", "s", subject="total"),
    "generation": partial(sides, "generate", "tokens/s"),
    "matmul": lambda: pivot(
        records("matmul", side="bitsandbytes"), {"rows of X": "{m}"}, {"{section}": "{ours} ({speedup})"}),
    "cache": lambda: pivot(
        records("step-cache", side="unpatched"),
        {"model, tokens": "{what}"}, {"{setting}": "{speedup}, {peak_gib:.1f} GiB"}),
    "recipes": partial(recipes, True),
    "recipes-more": partial(recipes, False),
    **{key: partial(lambda name: steps("{words}", records(name)), key) for key in ("recipe-16", "recipe-1b")},
    "lengths": lambda: pivot(
        [row | {"words": GRAPHS[row["side"]], "to": "not set" if row["pad_to"] == 1 else f"`{row['pad_to']}`"}
         for row in records("lengths")],
        {"`pad_to_multiple_of=`": "{to}", "different lengths": "{lengths}", "ms per step": "{words}"}, {"epoch {epoch}": "{step_ms:.1f}"}),
    "rollouts": lambda: pivot(
        [row | {"words": ROLLOUTS.get(row["side"], row["words"]), "of": "sequence" if row["batch"] == 1 else "sequences"}
         for row in generated()],
        {"tokens per second, wall-clock": "{words}"}, {"{batch} {of}": "{tokens_s:,.0f}"}),
    "kept": lambda: " / ".join(
        f"{kept['gpu_ms'] / base['gpu_ms']:.2f}"
        for kept, base in zip(*(records("recipe", side=side) for side in ("activations", "graphs")), strict=True)),
    # the peak with kept activations, less the one with recompute, in MiB per layer and 1,024 tokens
    "kept-mib": lambda: "{:.0f}".format(max(
        (kept["peak_gib"] - base["peak_gib"]) * 2**20 / kept["layers"] / kept["tokens"]
        for kept, base in zip(*(records("recipe", side=side) for side in ("activations", "graphs")), strict=True))),
    "graphs-cost": lambda: "{:.0%}".format(max(
        row["gpu_ms"] / base["gpu_ms"] - 1
        for name in ("recipe", "recipe-16", "recipe-1b", "recipe-moe")
        for row, base in zip(*(records(name, side=side) for side in ("graphs", "fused")), strict=True))).replace("%", " %"),
    "other-models": lambda: "{:.1f}×".format(
        operator.truediv(*(records("rollouts", model="qwen3.5", side=side)[0]["tokens_s"]
                           for side in ("graphs only", "bitsandbytes and peft, static cache")))),
    "grpo": lambda: pivot(
        [row | {"words": GRPO.get(row["side"], row["words"])} for row in records("grpo", what="grpo")],
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
    "offload": lambda: pivot(offload(**OFFLOADED), {"tokens": "{tokens:,}", **OFFLOAD}),
    "offload-more": lambda: pivot(
        (row for row in offload(offload="all", tokens=2048) if not OFFLOADED.items() <= row.items()),
        {"model": "{model}, LoRA r = {rank}", **OFFLOAD}),
    "offload-dense": lambda: pivot(dense(), {
        "model, tokens": "{model}, {tokens:,}", **OFFLOAD}),
    "card-70b": lambda: "{card_gb:.0f} GB".format_map(dense(model="Llama-3.1-70B")[0]),
    # a step next to everything resident, which alternates with it: 70B's first layers, and 32B
    "offload-turns": lambda: " and ".join("{:.2f}".format(operator.truediv(
        *(records("offload", model=model, in_turns=True, side=side)[0]["gpu_ms"] for side in ("all", "resident"))))
        for model in ("Llama-3.1-70B", "Qwen3-32B")),
    "wait": lambda: " ms instead of ".join(
        f"{row['wall_ms']:.0f}" for side in ("activations", "liger") for row in records("recipe", side=side, tokens=512)),
    "grpo-step": lambda: "{:.1f} s instead of {:.1f} (Unsloth's defaults: {:.1f})".format(*(
        records("grpo", side=side)[0]["step_s"] for side in ("fast", "bitsandbytes and peft", "unsloth"))),
    "packed-gb": partial(figure, "{packed_gb:.0f} GB"),
    "packed-qwen": partial(figure, "{packed_gb:.0f} GB instead of {dense_gb:.0f}"),
    "host-16-qwen": partial(figure, "{host_gb:.1f} GB", offload="6GiB"),
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
        ({"v": v, "values": ", ".join(values_of(v)), "default": f"`{v.default}`" if v.default else "unset"}
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


def rendered(page: Path) -> str:
    """Return the text of a page, up to date. Pages in docs/data are next to the data files."""
    text = PART.sub(part, page.read_text())
    return text.replace("](data/", "](") if page.parent == DATA else text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, list outdated pages")
    check = parser.parse_args(arguments).check
    outdated = {page: new for page in PAGES if (new := rendered(page)) != page.read_text()}
    if check and outdated:
        print("To rewrite the pages below, run python scripts/render_docs.py")
    for page, text in outdated.items():
        print("outdated:" if check else "written:", page.relative_to(ROOT))
        if not check:
            page.write_text(text)
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
