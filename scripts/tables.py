"""docs/data/*.json as records, and the tables and figures of README and docs.

A record is a row of a data file, or one side of a row, as a flat dict. Every table is a pivot of records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
GPUS = ("H100", "H200")  # that figures were taken on; the first where only one is shown
OURS, BITSANDBYTES, UNPATCHED, STOCK = "nf4_patch", "bitsandbytes", "unpatched", "stock"
GPU_TIME, WALL_TIME = "GPU time", "wall-clock time"
DENSE = "16-bit weights"
LIMITS = ("ceiling", "torch.empty", DENSE)  # what ours is held against
RELEASES = ("torch", "triton", BITSANDBYTES, "unsloth", "transformers", "peft")
Record = dict[str, Any]

# --- records ---


def sources() -> dict[str, str]:
    """Data file -> the command that writes it, as docs/data/README.md says; GPU in a name stands for h200, h100."""
    return dict(re.findall(r"^\| `([\w.-]+\.json)` \| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def records(name: str, **where: Any) -> list[Record]:
    """Return the rows of NAME-GPU.json, or a record per side of each row, whose fields have the values of ``where``."""
    found: list[Record] = []
    for gpu in GPUS:
        file = f"{name}-{gpu.lower()}.json"
        data = load(file) if (DATA / file).exists() else {}
        place = {"gpu": gpu, "file": file, "machine": data.get("machine")}
        found += [place | row for row in data.get("rows", ())]
        for section, rows in data.get("sections", {}).items():
            for row in rows:
                sides = sorted(row["median"], key=lambda side: (side != OURS, side not in LIMITS))
                found += [
                    place | {"section": section.removesuffix(" bf16")} | row | side_of(row, side) for side in sides
                ]
    return [record for record in found if matches(record, where)]


def matches(record: Record, where: Record) -> bool:
    """Each field has the value, or one of the values of a tuple."""
    return all(record.get(name) in (each if isinstance(each, tuple) else (each,)) for name, each in where.items())


def side_of(row: Record, side: str) -> Record:
    """Return what tables show of a side of a row.

    A ratio says how many times as fast ours is; of a limit, which part ours reaches. It is in italics where it is not clear.
    The subject of a step is "MODEL BATCHxTOKENS, SETTING OF THE CACHE, CLOCK".
    """
    what, *others = row["subject"].split(", ")
    clock = others.pop() if others and others[-1] == GPU_TIME else ""
    ratio, clear = row["ratio"].get(side), is_clear(row, side)
    time, ours = digits(row["median"][side]), digits(row["median"][OURS])
    times = f"{ratio:.2f}×" if ratio else "check failed" * (side in row["ratio"])
    part = f"{100 * ratio:.0f} %" if ratio and side in LIMITS else times
    italic = "*" if ratio and not clear and side not in LIMITS else ""
    return {
        "side": side, "who": what.rpartition(" ")[0], "length": what.rpartition(" ")[2], "by": clock or WALL_TIME,
        "setting": others[0] if others else "patch", "unit": row["unit"].replace("us", "µs"), "ratio": ratio, "clear": clear,
        "size": math.prod(row["sizes"].get(name, 1) for name in ("batch", "tokens")), "m": row["sizes"].get("m"), "time": time,
        "times": times, "won": f"{italic}{ours} ({times}){italic}",
        "against": f"{italic}{time} ({part}){italic}" if part else time,
        "memory": row["notes"].get(f"peak memory, {side}", "").removesuffix(" GiB"),
    }  # fmt: skip


def is_clear(row: Record, other: str) -> bool:
    """Return whether the fused matmul ran where it was to, and the difference is no noise.

    It is more than either side differs from itself, and goes the same way in four rounds of five.
    """
    ratio = row["ratio"].get(other)
    if not ratio or row["notes"].get("fused") == "no":
        return False
    rounds = [a < b for a, b in zip(row["times"][OURS], row["times"][other], strict=True)]
    same_way = rounds.count(row["median"][OURS] < row["median"][other])
    return abs(ratio - 1) > max(row["noise"][OURS], row["noise"][other]) and same_way >= 0.8 * len(rounds)


def compared(name: str, ours: str, other: str, **where: Any) -> list[Record]:
    """Return how many times as fast one side of NAME-GPU.json is as another, by clock and tokens, for rows like ``where``."""
    found = []
    for clock, field, noises in (
        (GPU_TIME, "gpu", 1),
        (WALL_TIME, "wall", 2),
    ):  # wall-clock times differ more between two runs
        theirs = {(row["gpu"], row["tokens"]): row for row in records(name, side=other, **where)}
        for row in records(name, side=ours, **where):
            sides = row, theirs[row["gpu"], row["tokens"]]
            ratio = sides[1][f"{field}_ms"] / sides[0][f"{field}_ms"]
            clear = abs(ratio - 1) > noises * max(side[f"{field}_spread"] for side in sides)
            found.append(row | {"size": row["tokens"], "by": clock, "ratio": ratio, "clear": clear})
    return found


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


# --- one table for all ---


class Column(NamedTuple):
    """A column of a pivot, or one for each header that its format gives.

    show: a format of a record's fields, or a function of the records of a cell.
    where: the records that it shows. None: the column is part of the key, and records that are alike in the key share a row.
    """

    header: str
    show: str | Callable[[list[Record]], str]
    where: Record | None = None
    between: str = " / "

    def cell(self, found: list[Record]) -> str:
        return self.show(found) if callable(self.show) else self.between.join(map(self.show.format_map, found))


def pivot(found: Iterable[Record], *columns: Column) -> str:
    """Return a table in Markdown; rows and columns in the order in which they are first met."""
    rows: dict[tuple[str, ...], dict[tuple[int, str], list[Record]]] = {}
    for record in found:
        row = rows.setdefault(tuple(column.cell([record]) for column in columns if column.where is None), {})
        for place, column in enumerate(columns):
            cell = (
                row.setdefault((place, column.header.format_map(record).strip()), [])
                if matches(record, column.where or {})
                else []
            )
            cell[:] = [*cell, record] if column.where is not None else [record]
    heads = sorted(dict.fromkeys(head for row in rows.values() for head in row), key=lambda head: head[0])
    body = [[columns[head[0]].cell(row[head]) if head in row else "" for head in heads] for row in rows.values()]
    lines = ["| " + " | ".join(row).replace("|  ", "| ") + " |" for row in ([name for _, name in heads], *body)]
    return re.sub(r"(\d)x(\d)", r"\1×\2", "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]))


def measured(found: list[Record], *columns: Column) -> str:
    """Return the pivot of the first GPU that has data, under the name of the GPU, the file and the releases."""
    if not found:
        return "Not measured yet."
    gpu, file, machine = (found[0][name] for name in ("gpu", "file", "machine"))
    with_ = ", ".join(f"{name} {machine['releases'][name]}" for name in RELEASES if name in machine["releases"])
    rows = pivot((record for record in found if record["gpu"] == gpu), *columns)
    return f"**{gpu}** ([{file}](data/{file}) of {machine['date']} with {with_}):\n\n{rows}"


# --- what is gained ---

LIGER = "and `use_liger_kernel=True`"
AUTO, FUSED, GRAPHED = (
    '`enable(cache="auto")`',
    f'`enable(lora="fused")` {LIGER}',
    f'`enable(lora="fused", graphs="auto")` {LIGER}',
)
PACKED, MATMUL = f'`enable(experts="4bit", lora="fused")` {LIGER}', '`enable(matmul="auto")`'
PACKED_GRAPHED = f'`enable(experts="4bit", lora="fused", graphs="auto")` {LIGER}'
STEP, STEPS, MIXTURE = (
    " tokens per step",
    partial(partial, compared, "step-trl"),
    partial(partial, compared, "step-moe-trl"),
)
EXPERTS, SAME, DENSE_TRL = "a mixture, LoRA on experts", "the same mixture", "a dense model, TRL"
PLAIN, UNSLOTH = "peft or TRL", "Unsloth 2026.10 or newer, PyTorch ≥ 2.11"
# what one trains with -> what to type, what it is compared with, what a size counts, and the records
GAINS: dict[str, tuple[str, str, str, Callable[[], list[Record]]]] = {
    EXPERTS: (PACKED, "peft, experts in 16 bits", STEP, MIXTURE("liger, fused", "16-bit experts")),
    SAME: ("the same", "Unsloth", STEP, MIXTURE("liger, fused", "unsloth")),
    f"{SAME}, graphs": (
        PACKED_GRAPHED, "Unsloth", STEP, partial(compared, "graphs", "graphs", "unsloth", model="Qwen3-30B-A3B")),
    f"{DENSE_TRL}, graphs": (
        GRAPHED, "Unsloth", STEP, partial(compared, "graphs", "graphs", "unsloth", model="Llama-3.1-8B", layers=4)),
    DENSE_TRL: (FUSED, "Unsloth", STEP, STEPS("liger, fused", "unsloth")),
    PLAIN: ("`enable()`", "no patch", STEP, STEPS("peft, patch", "peft")),
    "peft or TRL, memory to spare": (AUTO, "no patch", STEP, STEPS("peft, patch, cached", "peft")),
    UNSLOTH: (AUTO, "no patch", STEP, STEPS("unsloth, patch, cached", "unsloth")),
    "4-bit generation, compiled": (
        MATMUL, BITSANDBYTES, " sequences at once", partial(records, "generate", side=STOCK, setting="compiled")),
}  # fmt: skip
FIRST = (
    EXPERTS,
    f"{SAME}, graphs",
    f"{DENSE_TRL}, graphs",
    PLAIN,
    UNSLOTH,
)  # rows of the README


def gains() -> list[Record]:
    return [
        record | {"trained": trained, "typed": typed, "against": against, "of": of}
        for trained, (typed, against, of, find) in GAINS.items() for record in find()
    ]  # fmt: skip


def ratios(found: list[Record]) -> str:
    """Return how many times as fast each record is, or ≈1 if the difference is within the noise."""
    if not any(each["clear"] for each in found):
        return "≈1"
    return " / ".join(f"{each['ratio']:.2f}" if each["clear"] else "≈1" for each in found) + "×"


def sizes(found: list[Record]) -> str:
    return " / ".join(dict.fromkeys(f"{each['size']:,}" for each in found)) + found[0]["of"]


# --- records of their own ---

RESULTS = {"4096x14336 bf16": "dequantize 4096x14336 to bf16, GPU time", "a new tensor": "host time per call",
           "total": "the public NF4 challenge, 9,000 calls"}  # fmt: skip


def results() -> list[Record]:
    found = [*records("bench", section=("dequantize", "host")), *records("challenge")]
    return [
        record | {"words": RESULTS[record["subject"]], "release": record["machine"]["releases"].get(record["side"].split()[0].lower(), "")}
        for record in found if record["gpu"] == GPUS[0] and record["subject"] in RESULTS
    ]  # fmt: skip


PARTS = {"patch": "none", "cache 1/4": "1/4", "cache 1/2": "1/2", "cache 3/4": "3/4 of them", "cache all": "all weights"}  # fmt: skip


def peak(row: Record) -> float:
    """GiB, of a step with the patch."""
    return float(row["notes"]["peak memory"].split()[0])


def room(memory: float) -> float:
    """GiB of a GPU that training may take: less what cache="auto" leaves free."""
    return (memory - memory / 24 - 2**29) / 2**30


def fits(memory: float, found: list[Record]) -> str:
    """Return the largest cache of a measured step that a GPU has room for, and the GPU time that this step gained."""
    fit = [record for record in found if peak(record) <= room(memory)]
    return f"{PARTS[fit[-1]['setting']]}: {fit[-1]['times']}" if fit else "no room"


def releases() -> list[Record]:
    """Return a record per run of scripts/release_matrix.py."""
    none = dict.fromkeys((*RELEASES, "wrapt"), "")
    return [
        run | none | {name: release.partition("+")[0] for name, release in run["releases"].items()}
        | {"place": "CPU" if "CPU" in run["place"] else run["place"].removeprefix("NVIDIA ").partition(" (")[0]}
        for run in load("releases.json")
    ]  # fmt: skip


def every_mixture() -> str:
    """Return which folders of transformers.models can do what: those that can do the same share a row, the most first."""
    data = load("mixtures.json")
    alike = [*data["mixtures"].values()]
    found = (
        {"name": name} | row for name, row in sorted(data["mixtures"].items(), key=lambda each: -alike.count(each[1]))
    )
    releases = ", ".join(f"{name} {release}" for name, release in data["releases"].items())
    return f"{releases} ([mixtures.json](data/mixtures.json)):\n\n" + pivot(
        found, Column("folder of transformers.models", "{name}", {}, ", "), Column("packed", "{packed}"),
        Column("saved and loaded again", "{reload}"), Column("LoRA with the usual `target_modules`", "{tutorial}"),
        Column("LoRA with `target_parameters`", "{parameters}"), Column("merged", "{merge}"), Column("dequantized and saved", "{export}"),
    )  # fmt: skip


RECIPE = {  # what is switched on, one after another: side of the data -> in words
    "peft": "plain TRL script",
    "16-bit experts": "plain TRL script, experts in 16 bits",
    "peft, patch": "the patch",
    "peft, fused": 'the patch, `lora="fused"`',
    "liger, fused": 'the patch, `lora="fused"`, Liger',
    "liger, no loss, fused": 'the patch, `lora="fused"`, Liger without its loss',
    "liger, fused, cached": 'the patch, `lora="fused"`, Liger, `cache="auto"` with room for every weight',
    "compiled layers": "compiled layers",
    "compiled layers, patch": "the patch, compiled layers",
    "unsloth": "Unsloth",
    "unsloth, patch, cached": 'Unsloth with `enable(cache="auto")`',
}


def step(name: str, words: dict[str, str] | None = None) -> str:
    """Return the table of a step as TRL trains it: every side, or those of ``words`` in its order."""
    sides = words or {record["side"]: record["side"] for record in records(name)}
    found = [record | {"words": words_} for side, words_ in sides.items() for record in records(name, side=side)]
    return measured(
        found, Column("ms, GPU time / wall-clock time", "{words}"), Column("{tokens:,} tokens", "{gpu_ms:.1f}\u00a0/\u00a0{wall_ms:.1f}", {}),
        Column("launches, {tokens:,}", "{launches:,}", {"tokens": 2048}), Column("GiB, {tokens:,}", "{peak_gib:.2f}", {}),
    )  # fmt: skip


GRAPHED_SIDES = {
    "eager": "without graphs",
    "graphs": '`graphs="auto"`',
    "unsloth": "Unsloth",
    "unsloth, block graphs": "Unsloth, `UNSLOTH_BLOCK_CUDAGRAPHS=1`",
}


def graphed() -> str:
    """Return the table of layers as CUDA graphs: a row per side of each model."""
    found = [
        record | {"words": f"{record['model']}, {record['layers']} layers: {words}"}
        for model, layers in dict.fromkeys((r["model"], r["layers"]) for r in records("graphs"))
        for side, words in GRAPHED_SIDES.items()
        for record in records("graphs", model=model, layers=layers, side=side)
    ]
    shown = sorted(found, key=lambda record: record["tokens"])
    order = {record["words"]: None for record in found}
    return measured(
        [record for words_ in order for record in shown if record["words"] == words_],
        Column("ms, wall-clock time / GPU time", "{words}"),
        Column("{tokens:,} tokens", "{wall_ms:.1f}\u00a0/\u00a0{gpu_ms:.1f}", {}),
    )  # fmt: skip


ADAPTER_SIDES = {
    "bnb": "bitsandbytes and peft", "enable": "`enable()`", "auto": '`enable(matmul="auto")`',
    "auto plain": '`enable(matmul="auto")`, no adapter', "dense": "adapter merged into 16-bit weights",
}  # fmt: skip


def with_adapter() -> str:
    """Return the table of a decode step with a LoRA adapter."""
    found = [
        record | {"words": words}
        for side, words in ADAPTER_SIDES.items()
        for record in sorted(
            records("generation-lora", side=side), key=lambda each: (each["code"] != "eager", each["batch"])
        )
    ]
    return measured(
        found, Column("tokens per second of the layers", "{words}"),
        Column("{code} layers ({layers}), {batch} sequences", "{tokens_s:,.0f}", {}),
    )  # fmt: skip


SWITCHES = {  # side of the data -> the switch that it adds to the rows above
    "peft": "a plain TRL script",
    "16-bit experts": "a plain TRL script, experts in 16 bits",
    "patch": "`enable({packed})`",
    "liger": "+ `use_liger_kernel=True`",
    "fused": '+ `lora="fused"`',
    "graphs": '+ `graphs="auto"`',
    "cache": '+ `cache="auto"` with room for every weight',
    "fused optimizer": '+ `optim="adamw_torch_fused"`',
    "paged optimizer": 'the same with `optim="paged_adamw_8bit"`',
    "unsloth": "Unsloth",
    "unsloth, fused optimizer": 'Unsloth, `optim="adamw_torch_fused"`',
}
LAYERS = {  # of the model, by the name of the data
    "recipe": "Four layers of Llama-3.1-8B",
    "recipe-16": "Sixteen layers of Llama-3.1-8B",
    "recipe-moe": "Two layers of Qwen3-30B-A3B",
}
OPTIMIZER = 'Rows that name no `optim` use `optim="adamw_torch"`.'
LEGEND = "*Launches* counts the kernels and copies of a step. *GiB* is its peak memory. *The patch* means `enable({})`."


def switches(*names: str, older: str, packed: str = "") -> str:
    """Return a table per data file with a row per switch, or without such a file, the table of an older one.

    Args:
        older: the name of the file that is shown while none of ``names`` was measured.
        packed: the option of every row with the patch.
    """
    tables = []
    for name in names:
        found = [
            record | {"words": words.format(packed=packed)}
            for side, words in SWITCHES.items()
            for record in records(name, side=side)
        ]
        shown = measured(
            found, Column("ms, wall-clock time / GPU time", "{words}"),
            Column("{tokens:,} tokens", "{wall_ms:.1f}\u00a0/\u00a0{gpu_ms:.1f}", {}), Column("GiB, {tokens:,}", "{reserved_gib:.1f}", {}),
        )  # fmt: skip
        tables += [f"{LAYERS[name]}, {shown}"] * bool(found)
    if not tables:
        return f"{LAYERS[names[0]]}. {LEGEND.format(packed)}\n\n{step(older, RECIPE)}"
    legend = "Each row with a + has all switches above it. *GiB* is the memory that PyTorch reserved at the peak."
    return "\n\n".join([f"{legend} {OPTIMIZER}", *tables])


def requirements() -> str:
    """Return the releases of a measured step, for pip."""
    installed = records("step-trl")[0]["machine"]["releases"]
    pins = (f"{name}=={installed[name].partition('+')[0]}" for name in (*RELEASES, "wrapt") if name != "unsloth")
    return "\n".join(["```text", *pins, "click", "```"])


# --- mixtures in host memory ---

PARAMETERS = {"Qwen3-30B-A3B": 30.53e9, "gpt-oss-20b": 20.9e9, "Gemma-4-26B-A4B": 25.2e9, "GLM-4.5-Air": 106.9e9}
OPTIMIZERS = {"adamw8bit": "8-bit AdamW", "adamw": "AdamW"}


def mixture(name: str) -> Record:
    """Return the run that keeps only what is in flight on the GPU: LoRA with r = 16 on attention and experts, 2,048 tokens."""
    run = records(
        "offload", model=name, offload="all", rank=16, attention_only=False, tokens=2048, cap=(8, 14.4, 21.9)
    )[0]
    return run | {
        "parameters": PARAMETERS[name] / 1e9, "dense_gb": 2 * PARAMETERS[name] / 1e9, "experts_gb": run["in_host"] / 1e9,
        "others_gb": run["loaded"] / 1e9, "packed_gb": (run["loaded"] + run["in_host"]) / 1e9,
        "adapters_gb": run["adapters_held"] / 1e9, "peak_gb": run["peak"]["reserved"] / 1e9,
    }  # fmt: skip


def left_of() -> list[Record]:
    return [
        found | {"card": card, "left": f"{card - found['packed_gb']:.0f}" if card > found["packed_gb"] else "no room"}
        for found in map(mixture, PARAMETERS) for card in (16, 24, 40, 48, 80)
    ]  # fmt: skip


def offload() -> list[Record]:
    """Return the timed steps, next to the resident step where both alternated."""

    found = []
    runs = (records("offload", model=name, side=("resident", "budget", "all")) for name in PARAMETERS)
    for run in (run for each in runs for run in each if "gpu_ms" in run):
        same = {name: run[name] for name in ("gpu", "model", "tokens", "rank")}
        resident = records("offload", side="resident", in_turns=True, **same)[0]["gpu_ms"] if run["in_turns"] else 0.0
        bus = run["fetched"] / run["bus"] * 1e3
        times = [f"{run['gpu_ms'] / least:.2f}×" for least in (resident, max(resident, bus)) if resident]
        found.append(run | {
            "lora": f"r = {run['rank']}{', attention only' * run['attention_only']}, {OPTIMIZERS[run['optimizer']]}",
            "capped": f"{run['cap']:g} GiB" if run["cap"] else "none",
            "step": " ".join([f"{run['gpu_ms']:.0f}", *(f"({each})" for each in times[:1])]),
            "bus_ms": f"{bus:.0f} ({run['bus'] / 1e9:.0f})" if bus else "", "of_least": "".join(times[1:]),
            "peaks": " / ".join(f"{run[each]['reserved'] / 2**30:.1f}" for each in ("peak_loading", "peak")),
            "host": f"{run['in_host'] / 2**30:.1f}" if run["in_host"] else "",
        })  # fmt: skip
    return found


# --- the tables and figures by name ---

UNCACHED = {"setting": "patch"}


def subjects(name: str, **where: str) -> str:
    """Return the table of a benchmark: a row per subject, by the bytes that it moves, and a column per side."""
    found = [record for record in records(name, **where) if "fp16" not in record["subject"]]
    by_size = sorted(found, key=lambda record: record["nbytes"])
    return measured(by_size, Column("{unit}", "{subject}"), Column("{side}", "{against}", {}))


BLOCKS: dict[str, Callable[[], str]] = {
    "gains": lambda: pivot(
        gains(), Column("what you train with", "{trained}"), Column("what you type", "{typed}"), Column("compared with", "{against}"),
        Column("at", sizes, {}), Column("GPU", "{gpu}"), Column("{by}", ratios, {})),
    "first-gains": lambda: pivot(
        (record for record in gains() if record["trained"] in FIRST), Column("training", "{trained}"),
        Column("what to type", "{typed}"), Column("compared with", "{against}"), Column("GPU", "{gpu}"), Column("{by}", ratios, {})),
    "results": lambda: pivot(
        results(), Column("{gpu}", "{words}, {unit}"),
        Column("{side} {release}", "{against}", {"side": (OURS, BITSANDBYTES, "Unsloth Triton")})),
    "dequantize": partial(subjects, "bench", section="dequantize"),
    "dequantize-matmul": partial(subjects, "bench", section="dequantize + matmul"),
    "host": partial(subjects, "bench", section="host"),
    "challenge": partial(subjects, "challenge", subject="total"),
    "generation": partial(subjects, "generate"),
    "matmul": lambda: measured(
        records("matmul", side=BITSANDBYTES), Column("rows of X", "{m:,}"), Column("{section}", "{won}", {})),
    "cache": lambda: measured(
        records("step-cache"), Column("ms", "{who}"), Column("tokens", "{length}"),
        Column(UNPATCHED, "{time}", UNCACHED | {"side": UNPATCHED}), Column("{setting}", "{time}", {"side": OURS}),
        Column(DENSE, "{time}", UNCACHED | {"side": DENSE})),
    "fits": lambda: pivot(
        records("step-cache", gpu=GPUS[0], side=UNPATCHED), Column("model, tokens", "{who} {length}"),
        Column("all weights take", "{notes[cache]}", {"setting": "cache all"}), Column("no cache", "{times}", UNCACHED),
        *(Column(name, partial(fits, memory), {}) for name, memory in (("16 GB", 16e9), ("24 GB", 24e9), ("48 or 80 GB", 48e9)))),
    "experts-4bit": lambda: measured(
        records("step-experts-4bit", section="frozen experts"), Column("ms, GiB", "{who} {length}"),
        Column("{side}", "{time}, {memory}", {"side": (OURS, "cached")}),
        Column("{side}", "{against}, {memory}", {"side": "transformers' forward"})),
    "graphs": graphed,
    "generation-lora": with_adapter,
    "step-trl": partial(step, "step-trl"),
    "step-moe-trl": partial(step, "step-moe-trl"),
    "recipe": partial(switches, "recipe", "recipe-16", older="step-trl"),
    "recipe-compiled": partial(step, "step-compiled", RECIPE),
    "recipe-moe": partial(switches, "recipe-moe", older="step-moe-trl", packed='experts="4bit"'),
    "every-mixture": every_mixture,
    "mixtures-memory": lambda: pivot(
        left_of(), Column("model", "{model}"), Column("parameters", "{parameters:.0f} billion"), Column("in 16 bits", "{dense_gb:.0f}"),
        Column("packed", "{packed_gb:.0f}"), Column("left on {card} GB", "{left}", {})),
    "offload-parts": lambda: measured(
        [*map(mixture, PARAMETERS)], Column("GB", "{model}"), Column("packed experts", "{experts_gb:.1f}"),
        Column("all other weights", "{others_gb:.1f}"), Column("adapters in bf16", "{adapters_gb:.1f}"),
        Column('peak of a step with `"all"`', "{peak_gb:.1f}")),
    "offload": lambda: measured(
        offload(), Column("model, tokens", "{model}, {tokens:,}"), Column("LoRA", "{lora}"), Column("GPU memory capped at", "{capped}"),
        Column("`offload=`", '`"{offload}"`'), Column("step, ms (× resident)", "{step}"),
        Column("kernels alone, ms", "{kernels_ms:.0f}"), Column("bus alone, ms (GB/s)", "{bus_ms}"),
        Column("× the larger of resident step and bus", "{of_least}"), Column("peak loading / training, GiB", "{peaks}"),
        Column("in host memory, GiB", "{host}")),
    "releases": lambda: pivot(
        releases(), Column("on", "{place}"), Column("runs", "{cell}", {}, ", "),
        *(Column(name, f"{{{name}}}") for name in (*RELEASES, "wrapt")), Column("result", "{result}")),
    "requirements": requirements,
}  # fmt: skip


def figures() -> dict[str, str]:
    """Return the figures that sentences of the pages name, as they are written there."""
    qwen, glm = mixture("Qwen3-30B-A3B"), mixture("GLM-4.5-Air")
    attention = records("offload", model="Qwen3-30B-A3B", attention_only=True)[0]
    (cached,) = records("step-cache", gpu="H100", side=OURS, subject="Llama-3.1-8B 1x512, cache all, GPU time")
    checked, older = (load(f"verify{arch}-h100.json")["rows"] for arch in ("", "-sm75"))
    fuzz = load("fuzz-h100.json")

    def card(run: Record) -> str:
        """The GPU that a run was capped for: CUDA itself takes 0.5 GB."""
        return f"on {run['cap'] * 2**30 / 1e9 + 0.5:.0f} GB"

    return {
        "packed-qwen": f"{qwen['packed_gb']:.0f} GB instead of {qwen['dense_gb']:.0f}",
        "card-qwen": card(records("offload", model="Qwen3-30B-A3B", offload="3GiB", attention_only=False)[0]), "card-glm": card(glm),
        "host-qwen": f"{qwen['experts_gb']:.0f} GB", "host-glm": f"{glm['experts_gb']:.0f} GB",
        "adapter-attention": f"{attention['adapters_held'] / 1e6:.0f} MB", "adapter-experts": f"{qwen['adapters_gb']:.1f} GB",
        "adapters-qwen": f"{qwen['adapters_gb'] / 2:.2f} billion",
        "cached-8b": f"{float(cached['notes']['cache'].split()[0]):.0f} GiB", "peak-8b": f"{peak(cached):.1f} GiB",
        "left-of-24": f"{room(24e9):.1f} GiB",
        **{name: " | ".join(f"{sum(row[field] for row in rows):,}" for field in ("cases", "elements", "differing")) + " differing"
           for name, rows in (("verified", checked), ("older", older))},
        "fuzzed": f"{fuzz['cases']:,} | {fuzz['elements']:,} | {len(fuzz['mismatches'])} differing, {len(fuzz['out_of_bounds'])} writes",
    }  # fmt: skip
