"""The tables of README and docs, as data: records, and columns that say which of their fields are shown where.

A column whose header has a field in it, such as ``{side}``, becomes a column for each value of that field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from figures import (
    BITSANDBYTES,
    DENSE,
    GPU_TIME,
    GPUS,
    LIMITS,
    OURS,
    PEFT,
    STOCK,
    UNPATCHED,
    Record,
    load,
    matches,
    numbers,
    of_gpus,
    peak,
    records,
    room,
    span,
    unserved,
)  # fmt: skip

# --- one table for all ---


class Column(NamedTuple):
    """``show``: a format of a record's fields, or a function of the records of a cell. ``where``: records that it shows, by
    field; without it (None) the column is part of the key: records that are alike in all those columns share a row."""

    header: str
    show: str | Callable[[list[Record]], str]
    where: Record | None = None
    between: str = " / "


def cell(column: Column, found: list[Record]) -> str:
    return column.show(found) if callable(column.show) else column.between.join(map(column.show.format_map, found))


def table(columns: Sequence[Column], found: Iterable[Record]) -> str:
    """Markdown; rows and the columns of one field in the order in which they are first met."""
    rows: dict[tuple[str, ...], dict[tuple[int, str], list[Record]]] = {}
    for record in found:
        key = tuple(cell(column, [record]) for column in columns if column.where is None)
        cells = rows.setdefault(key, {})
        for place, column in enumerate(columns):
            if column.where is None or matches(record, column.where):
                cells.setdefault((place, column.header.format_map(record)), []).append(record)
    heads = sorted(dict.fromkeys(head for cells in rows.values() for head in cells), key=lambda head: head[0])
    body = [[cell(columns[h[0]], cells[h][: 1 if columns[h[0]].where is None else None]) if h in cells else "" for h in heads]
            for cells in rows.values()]  # fmt: skip
    lines = ["| " + " | ".join(row).replace("|  ", "| ") + " |" for row in ([name for _, name in heads], *body)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


class Table(NamedTuple):
    """A block of a page. ``others``: the field by which a line sums up the GPUs after the first, which alone has the table.
    ``apart``: a field; each of its values has a table. ``above``: what stands there instead of machine and releases."""

    records: Callable[[], list[Record]]
    columns: Sequence[Column]
    others: str = ""
    apart: str = ""
    above: Callable[[], str] | None = None

    def __call__(self) -> str:
        found = self.records()
        if not found:
            return "Not measured yet."
        gpus = dict.fromkeys(record["gpu"] for record in found) if self.others else [None]
        first, *rest = ([record for record in found if gpu in (None, record.get("gpu"))] for gpu in gpus)
        parts = [self.above()] if self.above else [machines(first)] if self.others else []
        units = ", ".join(dict.fromkeys(record["unit"] for record in first)) if "unit" in first[0] else ""
        first = [record | {"units": units} for record in first]
        for name in dict.fromkeys(record[self.apart] for record in first) if self.apart else [""]:
            parts += [f"{name[0].upper()}{name[1:]}:"] if name else []
            parts.append(table(self.columns, [record for record in first if not name or record[self.apart] == name]))
        return "\n\n".join([*parts, *map(self.summed_up, rest)])

    def summed_up(self, found: list[Record]) -> str:
        groups: dict[str, list[Record]] = {}
        for record in found:
            if record["ratio"] and record["side"] not in LIMITS:
                groups.setdefault(self.others.format_map(record), []).append(record)
        files = ", ".join(dict.fromkeys(f"[{r['file']}](data/{r['file']}) of {r['machine']['date']}" for r in found))
        spans = ", ".join(f"{ratios(rows)} {name}" for name, rows in groups.items())
        return f"{found[0]['gpu']} ({files}), how many times as fast: {spans}."


def machines(found: list[Record]) -> str:
    """Where and with which releases a table was measured, in a line above it."""
    files = {record["file"]: record["machine"] for record in found}
    if len(files) > 1:
        named = ", ".join(f"[{file}](data/{file}) of {machine['date']}" for file, machine in files.items())
        return f"**{found[0]['gpu']}** ({named}):"
    ((file, machine),) = files.items()
    shown = ("torch", "triton", BITSANDBYTES, "unsloth", "transformers", "peft")
    installed = ", ".join(f"{name} {machine['releases'][name]}" for name in shown if name in machine["releases"])
    return f"**{found[0]['gpu']}** ({machine['date']}; {installed}; [{file}](data/{file})):"


def ratios(found: list[Record]) -> str:
    """From the smallest to the largest; in italics if none is clear."""
    text = span([record["ratio"] for record in found if record["ratio"]])
    return text if any(record["clear"] for record in found) else f"*{text}*"


# --- what is gained, in words ---


class Setup(NamedTuple):
    """What a user does and types, and the records that say what it gains; ``at`` names each of them."""

    who: str
    typed: str
    file: str
    where: Record
    at: str = "at {size:,}"
    unit: str = " tokens a step"


def gain(found: list[Record]) -> str:
    """In GPU time; in wall time, and said to be so, where there is no other. What is not clear is said to be so."""
    of_steps = [record for record in found if record["clock"] == GPU_TIME]
    shown = of_steps or found
    unit, wall = shown[0]["setup"].unit, ", wall time" * bool(shown[0]["size"] and not of_steps)
    if all(map(unserved, shown)):
        return "nothing without a cache: the kernel is not called"
    if not any(record["clear"] for record in shown):
        return f"not clear ({ratios(shown).strip('*')}){wall}"
    parts = [f"{record['times']} {record['at']}" for record in shown if record["clear"]]
    rest = [record["at"] for record in shown if not record["clear"]]
    return ", ".join(parts) + unit + f", not clear {', '.join(rest)}" * bool(rest) + wall


def gains(setups: Iterable[Setup], **where: Any) -> list[Record]:
    return [record | {"setup": setup, "at": setup.at.format_map(record)} for setup in setups
            for record in records(setup.file, **({"side": UNPATCHED} | setup.where | where)) if record["ratio"]]  # fmt: skip


AUTO = '`enable(cache="auto")`'
UNCACHED, CACHED = {"setting": "patch"}, {"setting": "cache all"}
MOE = {"who": "Qwen3-30B-A3B", "clock": GPU_TIME}
SETUPS = (
    Setup("peft or TRL", "`enable()`", "step-peft-GPU.json", UNCACHED),
    Setup("peft or TRL, memory to spare", AUTO, "step-peft-GPU.json", CACHED),
    Setup("a mixture of experts, peft", '`enable(experts="4bit")`', "step-experts-4bit-GPU.json", {"side": PEFT},
          unit=" tokens a step, LoRA on experts"),
    Setup("Unsloth up to 2026.9", "`enable()`", "step-unsloth-2026.9.7-GPU.json", UNCACHED),
    Setup("Unsloth from 2026.10 on, PyTorch ≥ 2.11", AUTO, "step-unsloth-GPU.json", CACHED),
    Setup("4-bit generation", '`enable(matmul="auto")`', "generate-GPU.json", {"side": STOCK, "setting": "compiled"},
          "at {what}", " (compiled)"),
)  # fmt: skip
MORE_SETUPS = (  # on the page "Will it help me" alone
    Setup("Unsloth from 2026.10 on", "`enable()`", "step-unsloth-GPU.json", UNCACHED),
    Setup("packed experts, LoRA on the attention", "`enable()`", "step-moe-GPU.json", MOE | {"setting": "checkpointing"}),
    Setup("packed experts, memory to spare", AUTO, "step-moe-GPU.json",
          MOE | {"setting": "checkpointing and everything cached"}),
    Setup("packed experts without gradient checkpointing", "`enable()`", "step-moe-GPU.json",
          MOE | {"setting": "no checkpointing"}),
    Setup("RL with TRL's GRPO, the model itself generates", '`enable(matmul="auto")`', "grpo-GPU.json",
          {"what": ("generation", "whole step")}, "({what})", ""),
)  # fmt: skip
WHO = (Column("what you train with", "{setup.who}"), Column("what you type", "{setup.typed}"))


def chooser() -> str:
    """What you train with, what you type, what you gain: on the first GPU."""
    shown = Column(f"what you gain on an {GPUS[0]} (steps: GPU time)", gain, {})
    return f"""{table((*WHO, shown), gains(SETUPS, gpu=GPUS[0]))}
| on a GPU older than a T4, AMD, Intel, Apple | | nothing: the originals run |
| on your GPU | `nf4-patch bench --step peft` | tells you in a minute |"""


# --- records of their own ---

TRAINERS = {"step-peft": "peft, bitsandbytes", "step-unsloth-2026.9.7": "Unsloth", "step-unsloth": "Unsloth"}
PARTS = {
    "patch": "none",
    "cache 1/4": "1/4",
    "cache 1/2": "1/2",
    "cache 3/4": "3/4 of them",
    "cache all": "all weights",
}
CACHE = {"setting": (*PARTS,), "who": ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")}


def steps(*names: str, **where: Any) -> list[Record]:
    """Those of a step: a setting of the cache after the other, wall time before GPU time."""
    found = records(*(f"{name}-GPU.json" for name in names), **where)
    for record in found:
        trainer = TRAINERS.get(record["file"].rpartition("-")[0], "")
        installed = record["machine"]["releases"].get(trainer.split(" ")[-1].lower(), "")
        record |= {"trainer": f"{trainer} {installed}", "by": record["clock"] or "wall time"}
    return sorted(found, key=lambda record: ([*PARTS].index(record["setting"]), record["clock"]))


def fits(memory: float, found: list[Record]) -> str:
    """The largest cache of a measured step that a GPU has room for, and the GPU time that this step gained."""
    fit = [record for record in found if peak(record) <= room(memory)]
    return f"{PARTS[fit[-1]['setting']]}: {fit[-1]['times']}" if fit else "no room"


RESULTS = {  # what is shown of which file, in words
    "4096×14336 bf16": ("bench", "dequantize 4096×14336 to bf16, GPU time"),
    "a new tensor": ("bench", "host time per call"),
    "total": ("challenge", "the public NF4 challenge, 9,000 calls"),
    "peft 1×512, GPU time": ("step-peft", "a QLoRA step of peft, 512 tokens, GPU time"),
}
SIDES = (OURS, BITSANDBYTES, UNPATCHED, "Unsloth Triton")


def results() -> list[Record]:
    installed = next(of_gpus("bench-GPU.json"))[2]["machine"]["releases"]
    return [record | {"words": words, "installed": installed} for subject, (file, words) in RESULTS.items()
            for record in records(f"{file}-GPU.json", subject=subject, side=SIDES) if "matmul" not in record["section"]]  # fmt: skip


SHOWN = ("torch", "triton", BITSANDBYTES, "unsloth", "transformers", "peft", "wrapt")


def releases() -> list[Record]:
    found = []
    for run in load("releases.json"):
        installed = {name: run["releases"].get(name, "").split("+")[0] for name in SHOWN}
        place = "CPU" if "CPU" in run["place"] else run["place"].removeprefix("NVIDIA ").split(" (")[0]
        found.append(run | installed | {"place": place})
    return found


def each(name: str, found: list[Record]) -> str:
    return ", ".join(sorted({record[name] for record in found} - {""}, key=numbers))


def kernel_parts() -> list[Record]:
    """What the parts of the longest step with LoRA on experts take, of the sides that are compared."""
    found = []
    for gpu, file, data in of_gpus("step-experts-kernels-GPU.json"):
        row = data["sections"]["LoRA on experts"][-1]
        parts = {"the whole step": row["median"]}
        for kind, note in row["notes"].items():
            if "peak" not in kind:
                parts[kind] = {side: float(ms) for side, ms in (part.rsplit(" ", 1) for part in note.split(", "))}
        of_file = {"gpu": gpu, "file": file, "machine": data["machine"], "ratio": None}
        found += [of_file | {"kind": kind, "side": side, "ms": parts[kind].get(side, 0)}
                  for kind in sorted(parts, key=lambda kind: -max(parts[kind].values()))
                  for side in (OURS, "no checkpointing", "unsloth")]  # fmt: skip
    return found


def every_mixture() -> list[Record]:
    """The folders with which the same can be done come together, the most first."""
    found = load("mixtures.json")["mixtures"]
    alike = [*found.values()]
    return [{"name": name, **row} for name, row in sorted(found.items(), key=lambda item: -alike.count(item[1]))]


def plain(name: str) -> list[Record]:
    """Of a file that has a list of rows."""
    return [
        {"gpu": gpu, "file": file, "ratio": None, **data, **row}
        for gpu, file, data in of_gpus(name)
        for row in data["rows"]
    ]


# --- the blocks ---

SUBJECT, TOKENS = (Column("{units}", "{subject}"), Column("{side}", "{against}", {})), Column("tokens", "{length}")
SHAPES = ("512×2048", "512×3584", "4096×1024", "1024×8192", "3584×3584", "8192×2048", "14336×4096", "8192×8192", "18944×3584",
          "28672×8192")  # fmt: skip
TRL = (Column("tokens", "{tokens:,}"), Column("", "{side}"), Column("GPU time, ms", "{gpu_ms:.1f}"),
       Column("by the clock, ms", "{wall_ms:.1f}"), Column("host, ms", "{host_ms:.1f}"), Column("launches", "{launches:,}"),
       Column("peak, GiB", "{peak_gib:.2f}"))  # fmt: skip
BLOCKS: dict[str, Callable[[], str]] = {
    "chooser": chooser,
    "gains": Table(lambda: gains(SETUPS + MORE_SETUPS), (*WHO, *(Column(f"gain on an {g}", gain, {"gpu": g}) for g in GPUS))),
    "results": Table(results, (
        Column(GPUS[0], "{words}"), Column(OURS, "{time} {unit}", {"gpu": GPUS[0], "side": OURS}),
        Column("bitsandbytes {installed[bitsandbytes]}", "{against}", {"gpu": GPUS[0], "side": SIDES[1:3]}),
        Column("Unsloth {installed[unsloth]}", "{against}", {"gpu": GPUS[0], "side": SIDES[3]}),
        Column(f"on an {GPUS[1]}", "{marked}", {"gpu": GPUS[1], "side": SIDES[1:]}))),
    "dequantize": Table(
        lambda: sorted(records("bench-GPU.json", section="dequantize", subject=tuple(f"{shape} bf16" for shape in SHAPES)),
                       key=lambda record: record["nbytes"]), SUBJECT, others="{side}"),
    "dequantize-matmul": Table(
        lambda: [record for record in records("bench-GPU.json", section="dequantize + matmul") if record["ratio"]],
        (Column("how many times as fast as", "{side}"), Column("[{gpu}](data/{file})", ratios, {}))),
    "host": Table(partial(records, "bench-GPU.json", section="host"), SUBJECT, others="{side}"),
    "challenge": Table(partial(records, "challenge-GPU.json", what="total"), SUBJECT, others="{side}"),
    "generation": Table(partial(records, "generate-GPU.json"), SUBJECT, others="{side}"),
    "grpo": Table(partial(records, "grpo-GPU.json"), SUBJECT, others="{side}"),
    "steps": Table(partial(steps, *TRAINERS, side=UNPATCHED), (
        Column("ms, wall time / GPU time", "{trainer}"), TOKENS, Column(UNPATCHED, "{time}", UNCACHED),
        Column("{setting}", "{won}", {})), others="{trainer}, {by}"),
    "cache": Table(partial(steps, "step-cache", **CACHE), (
        Column("ms", "{who}"), TOKENS, Column(UNPATCHED, "{time}", UNCACHED | {"side": UNPATCHED}),
        Column("{setting}", "{time}", {"side": OURS}), Column(DENSE, "{time}", UNCACHED | {"side": DENSE})),
        others="({setting})"),
    "matmul": Table(partial(records, "matmul-GPU.json", side=BITSANDBYTES, m=tuple(2**power for power in range(11))), (
        Column("rows of X", "{m:,}"), Column("{section}", "{won}", {})), others="at {section}"),
    "experts-4bit": Table(partial(records, "step-experts-4bit-GPU.json"), (
        Column("ms, GiB", "{who} {length}"), Column("{side}", "{time}, {memory}", {"side": (OURS, "cached", "experts in 16 bits")}),
        Column("{side}", "{against}, {memory}", {"side": ("transformers' forward", PEFT)})), others="{side}", apart="section"),
    "experts-kernels": Table(
        kernel_parts, (Column("GPU time, ms", "{kind}"), Column("{side}", "{ms:.1f}", {})), others="{side}"),
    "experts": Table(partial(records, "step-moe-GPU.json", side=UNPATCHED, clock=GPU_TIME), (
        Column("GPU time, how many times as fast", lambda found: found[0]["who" if found[0]["setting"] == "16 layers" else "setting"]),
        Column("[{gpu}](data/{file})", ratios, {}))),
    "fits": Table(partial(steps, "step-cache", gpu=GPUS[0], side=UNPATCHED, **CACHE), (
        Column("model, tokens", "{who} {length}"), Column("all weights take", "{notes[cache]}", CACHED),
        Column("no cache", "{times}", UNCACHED), *(Column(f"{name} GB", partial(fits, size), {})
                                                   for name, size in (("16", 16e9), ("24", 24e9), ("48 or 80", 48e9))))),
    "every-mixture": Table(every_mixture, (
        Column("in transformers.models", "{name}", {}, ", "), Column("packed", "{packed}"),
        Column("saved and loaded again", "{reload}"), Column("LoRA by the usual `target_modules`", "{tutorial}"),
        Column("LoRA by `target_parameters`", "{parameters}"), Column("merged", "{merge}"),
        Column("dequantized and saved", "{export}")), above=lambda: "{} ([mixtures.json](data/mixtures.json)):".format(
            ", ".join(map(" ".join, load("mixtures.json")["releases"].items())))),
    "instructions": Table(lambda: load("instructions.json")["kernels"], (
        Column("result", "{dtype}"), Column("{kernel}", lambda found: span([each["instructions"] for each in found], ""), {})),
        above=lambda: "Triton {}, {} ([instructions.json](data/instructions.json)):".format(
            load("instructions.json")["triton"],
            ", ".join(dict.fromkeys(row["arch"] for row in load("instructions.json")["kernels"])))),
    "releases": Table(releases, (
        Column("on", "{place}"), Column("runs", lambda found: str(len(found)), {}),
        *(Column(name, partial(each, name), {}) for name in SHOWN), Column("result", "{result}"))),
    "step-trl": Table(partial(plain, "step-trl-GPU.json"), TRL, others="{side}"),
    "step-moe-trl": Table(partial(plain, "step-moe-trl-GPU.json"), TRL, others="{side}"),
}  # fmt: skip
