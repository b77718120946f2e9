"""The tables of README and docs, as data: records, and columns that say which of their fields are shown where.

A column whose header has a field in it, such as ``{side}``, becomes a column for each value of that field.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import memory
from figures import compared, load, matches, numbers, of_gpus, peak, records, room, shape, span

from figures import BITSANDBYTES, DATA, DENSE, GPU_TIME, GPUS, OURS, STOCK, UNPATCHED, Record  # isort: skip

SHOWN = ("torch", "triton", BITSANDBYTES, "unsloth", "transformers", "peft", "wrapt")

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
    heads: dict[tuple[int, str], None] = {}
    for record in found:
        row = rows.setdefault(tuple(cell(column, [record]) for column in columns if column.where is None), {})
        for place, column in enumerate(columns):
            head = (place, column.header.format_map(record))
            if column.where is None:
                row[head] = [record]
            elif matches(record, column.where):
                row.setdefault(head, []).append(record)
            else:
                continue
            heads[head] = None
    shown = sorted(heads, key=lambda head: head[0])
    body = [[cell(columns[head[0]], row[head]) if head in row else "" for head in shown] for row in rows.values()]
    lines = ["| " + " | ".join(row).replace("|  ", "| ") + " |" for row in ([name for _, name in shown], *body)]
    return shape("\n".join([lines[0], "|" + "---|" * len(shown), *lines[1:]]))


MACHINES = "machines"


class Table(NamedTuple):
    """A block of a page. ``above``: a line above it, a format of a record; "machines": GPU, files and releases, of the first GPU
    that has data, which alone is shown."""

    records: Callable[[], list[Record]]
    columns: Sequence[Column]
    above: str = ""

    def __call__(self) -> str:
        found = self.records()
        if not found:
            return "Not measured yet."
        parts = []
        if self.above == MACHINES:
            found = [record for record in found if record["gpu"] == found[0]["gpu"]]
            parts.append(machines(found))
        elif self.above:
            parts.append(self.above.format_map(found[0]))
        units = ", ".join(dict.fromkeys(record.get("unit", "") for record in found))
        return "\n\n".join([*parts, table(self.columns, [record | {"units": units} for record in found])])


def machines(found: list[Record]) -> str:
    """Where and with which releases a table was measured, in a line above it."""
    files, parts = {record["file"]: record["machine"] for record in found}, []
    for file, machine in files.items():
        known = machine["releases"]
        installed = ", ".join(f"{name} {known[name]}" for name in SHOWN[:-1] if name in known)
        parts.append(f"[{file}](data/{file}) of {machine['date']}" + f" with {installed}" * (len(files) == 1))
    return f"**{found[0]['gpu']}** ({', '.join(parts)}):"


def ratios(found: list[Record]) -> str:
    """From the smallest to the largest; in italics if none is clear."""
    text = span([record["ratio"] for record in found if record["ratio"]])
    return text if any(record["clear"] for record in found) else f"*{text}*"


# --- what is gained, in words ---

AUTO, EXPERTS, MATMUL = (f"`enable({option})`" for option in ('cache="auto"', 'experts="4bit"', 'matmul="auto"'))
FUSED = '`enable(lora="fused")` and `use_liger_kernel=True`'
UNCACHED, CACHED = {"setting": "patch"}, {"setting": "cache all"}


class Setup(NamedTuple):
    """What one trains with, what to type, the records that say what is gained, what that is compared with, what a record is of,
    and what is said of all."""

    trained: str
    typed: str
    find: Callable[..., list[Record]]
    against: str = "no patch"
    at: str = "{size:,}"
    of: str = " tokens a step"

    def records(self, **where: Any) -> list[Record]:
        found = [record for record in self.find() if record["ratio"] and matches(record, where)]
        each = [self.at.format_map(record) for record in found]
        every = {"every": [*dict.fromkeys(each)]}
        return [record | self._asdict() | every | {"at": at} for record, at in zip(found, each, strict=True)]


DENSE_STEP, MIXTURE_STEP = (partial(partial, compared, name) for name in ("step-trl", "step-moe-trl"))
LORA_ON_EXPERTS = Setup("a mixture of experts, peft", EXPERTS, MIXTURE_STEP("peft, patch", "16-bit experts"),
                        "peft, experts in 16 bits", of=" tokens a step, LoRA on experts")  # fmt: skip
UNSLOTHS_SPEED = Setup("TRL with Liger", FUSED, DENSE_STEP("liger, fused", "unsloth"), "Unsloth")
SAME_BITS = Setup("peft or TRL", "`enable()`", DENSE_STEP("peft, patch", "peft"))
SAME_BITS_CACHED = Setup("peft or TRL, memory to spare", AUTO, DENSE_STEP("peft, patch, cached", "peft"))
UNSLOTH = Setup("Unsloth from 2026.10 on, PyTorch ≥ 2.11", AUTO, DENSE_STEP("unsloth, patch, cached", "unsloth"))
GENERATION = Setup("4-bit generation, compiled", MATMUL, partial(records, "generate", side=STOCK, setting="compiled"), "bitsandbytes",
                   "{length}", " sequences at once")  # fmt: skip
SETUPS = [LORA_ON_EXPERTS, UNSLOTHS_SPEED, SAME_BITS, SAME_BITS_CACHED, UNSLOTH, GENERATION]
WHO = tuple(Column(*each) for each in
            (("what you train with", "{trained}"), ("what you type", "{typed}"), ("compared with", "{against}")))  # fmt: skip


def gains() -> list[Record]:
    return [record for setup in SETUPS for record in setup.records()]


def marked(found: list[Record]) -> str:
    """Every ratio of a setup, in italics where it is not clear, as "1.05 / *1.06*"; a dash where there is none."""
    shown = {each["at"]: f"{each['ratio']:.2f}" if each["clear"] else f"*{each['ratio']:.2f}*" for each in found}
    return " / ".join(shown.get(at, "-") for at in found[0]["every"]) + "×"


def measured_at(found: list[Record]) -> str:
    return " / ".join(found[0]["every"]) + found[0]["of"]


CLOCKS = [Column(f"{gpu}, {clock or 'by the clock'}", marked, {"gpu": gpu, "clock": clock})
          for gpu in GPUS for clock in (GPU_TIME, "")]  # fmt: skip


def install() -> str:
    """How to install it: from the repository where pyproject.toml has its address, with a badge that opens the notebook."""
    repository = re.findall(r'^repository = "(.*?)"', (DATA.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)[0]
    if not repository:
        return "```bash\npip install .    # in a clone: it is not on PyPI\n```"
    notebook = repository.replace("https://github.com", "https://colab.research.google.com/github")
    badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    return f"```bash\npip install git+{repository}\n```\n\n{badge}({notebook}/blob/main/examples/t4_colab.ipynb)"


def chooser() -> str:
    """What the README shows: what you train, what you type, what you gain, by GPU and clock where there are data."""
    shown = {
        "LoRA on a mixture's experts": LORA_ON_EXPERTS,
        "peft or TRL": UNSLOTHS_SPEED,
        "peft or TRL, the same bits": SAME_BITS,
        "the same, memory to spare": SAME_BITS_CACHED,
        "Unsloth, the same bits": UNSLOTH._replace(typed="what `nf4-patch doctor` says"),
    }
    found = [record | {"trained": who} for who, setup in shown.items() for record in setup.records()]
    batches = GENERATION.records(gpu=GPUS[0])
    return f"""Training, how many times as fast at {measured_at(SAME_BITS.records())}:

{table((Column("what you train", "{trained}"), *WHO[1:], *CLOCKS), found)}

Generating {measured_at(batches)}, compiled: {MATMUL} makes {marked(batches)} as many tokens a second as bitsandbytes."""


# --- records of their own ---

PARTS = {"patch": "none", "cache 1/4": "1/4", "cache 1/2": "1/2", "cache 3/4": "3/4 of them", "cache all": "all weights"}  # fmt: skip
CACHE = {"setting": (*PARTS,), "who": ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")}
SHAPES = [f"{shape} bf16" for shape in ("512x2048", "512x3584", "4096x1024", "1024x8192", "3584x3584", "8192x2048",
                                        "14336x4096", "8192x8192", "18944x3584", "28672x8192")]  # fmt: skip
RESULTS = {  # what is shown of which file, in words
    "4096x14336 bf16": ("bench", "dequantize 4096x14336 to bf16, GPU time"),
    "a new tensor": ("bench", "host time per call"),
    "total": ("challenge", "the public NF4 challenge, 9,000 calls"),
}
SIDES = (OURS, BITSANDBYTES, UNPATCHED, "Unsloth Triton")


def cached(**where: Any) -> list[Record]:
    """Those of a whole model's step, a size of the cache after the other."""
    return sorted(records("step-cache", **CACHE, **where), key=lambda record: [*PARTS].index(record["setting"]))


def fits(memory: float, found: list[Record]) -> str:
    """The largest cache of a measured step that a GPU has room for, and the GPU time that this step gained."""
    fit = [record for record in found if peak(record) <= room(memory)]
    return f"{PARTS[fit[-1]['setting']]}: {fit[-1]['times']}" if fit else "no room"


def results() -> list[Record]:
    installed = next(of_gpus("bench"))[2]["machine"]["releases"]
    return [record | {"words": words, "installed": installed} for subject, (file, words) in RESULTS.items()
            for record in records(file, subject=subject, side=SIDES) if "matmul" not in record["section"]]  # fmt: skip


def releases() -> list[Record]:
    found = []
    for run in load("releases.json"):
        installed = {name: run["releases"].get(name, "").split("+")[0] for name in SHOWN}
        place = "CPU" if "CPU" in run["place"] else run["place"].removeprefix("NVIDIA ").split(" (")[0]
        found.append(run | installed | {"place": place})
    return found


def each(name: str, found: list[Record]) -> str:
    return ", ".join(sorted({record[name] for record in found} - {""}, key=numbers))


def every_mixture() -> list[Record]:
    """The folders with which the same can be done come together, the most first."""
    data = load("mixtures.json")
    alike = [*data["mixtures"].values()]
    found = [data | row | {"name": name} for name, row in data["mixtures"].items()]
    return sorted(found, key=lambda record: -alike.count(data["mixtures"][record["name"]]))


# What is switched on, one after another: side of the data, in words
DENSE_RECIPE = {
    "peft": "a plain script of TRL",
    "peft, patch": "`enable()`: the same bits",
    "peft, fused": '`enable(lora="fused")`',
    "liger, fused": "that and `use_liger_kernel=True`",
    "liger, fused, cached": 'both and `cache="auto"`, with room for every weight',
    "compiled layers, patch": "`enable()` and compiled layers",
    "unsloth": "Unsloth",
    "unsloth, patch, cached": 'Unsloth with `enable(cache="auto")`',
}
MOE_RECIPE = {
    "16-bit experts": "a plain script of TRL: experts in 16 bits",
    "peft, patch": '`enable(experts="4bit")`',
    "peft, fused": '`enable(experts="4bit", lora="fused")`',
    "liger, fused": '`enable(experts="4bit", lora="fused")` and `use_liger_kernel=True`',
    "liger, no loss, fused": "the same without Liger's loss",
    "liger, fused, cached": 'the same with it and `cache="auto"`, with room for every weight',
    "unsloth": "Unsloth",
}


def recipe(name: str, steps: dict[str, str]) -> list[Record]:
    """A row a step, and a length."""
    found = [record | {"words": steps[record["side"]]} for record in plain(name) if record["side"] in steps]
    return sorted(found, key=lambda record: [*steps].index(record["side"]))


def requirements() -> str:
    """The releases of a measured step, for pip."""
    installed = next(of_gpus("step-trl"))[2]["machine"]["releases"] | {"click": ""}
    wanted = ("torch", "triton", BITSANDBYTES, "transformers", "peft", "wrapt", "click")
    pins = [f"{name}=={installed[name].partition('+')[0]}" if installed[name] else name for name in wanted]
    return "\n".join(["```text", *pins, "```"])


def plain(name: str) -> list[Record]:
    """Of files that have a list of rows."""
    found = ((data | {"gpu": gpu, "file": file, "ratio": None}, data["rows"]) for gpu, file, data in of_gpus(name))
    return [row | place for place, rows in found for row in rows]


# --- packed experts in host memory ---


def mixtures_memory() -> list[Record]:
    """What a mixture takes, and what a GPU has left."""
    return [
        {"name": name, "weights": f"{m.weights / 1e9:.0f} billion", "bf16": f"{2 * m.weights / 1e9:.0f}",
         "packed": f"{m.packed / 1e9:.0f}", "card": card,
         "left": f"{card - m.packed / 1e9:.0f}" if card > m.packed / 1e9 else "no room"}
        for name, m in memory.MIXTURES.items() for card in (16, 24, 40, 48, 80)
    ]  # fmt: skip


TOKENS_OF_TABLE = 2048
CARDS = (8, 12, 16, 24, 32, 40, 48, 80)  # GB
# what is trained: rank, where, optimizer, bytes of an adapter's weight
TRAINED: dict[str, Record] = {
    "r = 16 on the attention and the experts": {"rank": 16, "where": memory.ON},
    "r = 8 on both": {"rank": 8, "where": memory.ON},
    "r = 16 on the attention": {"rank": 16, "where": memory.OFF},
}
LEARNING: dict[str, Record] = {
    "r = 16, fp32, AdamW": {"rank": 16, "where": memory.ON, "optimizer": "AdamW", "size": 4},
    "r = 16, fp32, 8-bit AdamW": {"rank": 16, "where": memory.ON, "optimizer": "8-bit AdamW", "size": 4},
    "r = 16, bf16, AdamW": {"rank": 16, "where": memory.ON, "optimizer": "AdamW", "size": 2},
    "r = 16, bf16, 8-bit AdamW": {"rank": 16, "where": memory.ON, "optimizer": "8-bit AdamW", "size": 2},
    "r = 8, bf16, 8-bit AdamW": {"rank": 8, "where": memory.ON, "optimizer": "8-bit AdamW", "size": 2},
    "r = 16 on the attention alone, bf16, 8-bit AdamW": {"rank": 16, "where": memory.OFF, "optimizer": "8-bit AdamW", "size": 2},
}  # fmt: skip


def in_gb(value: float) -> str:
    return f"{value / 1e9:.1f}"


def offload_parts() -> list[Record]:
    return [
        {
            "name": name, "others": in_gb(m.frozen()), "experts": in_gb(m.experts_in("off")), "buffers": in_gb(m.experts_in("all")),
            "activations": in_gb(m.activations(TOKENS_OF_TABLE)),
        }
        for name, m in memory.MIXTURES.items()
    ]  # fmt: skip


def offload_learning() -> list[Record]:
    return [
        {"name": name, "how": how, "size": in_gb(mixture.learning(**given))}
        for how, given in LEARNING.items()
        for name, mixture in memory.MIXTURES.items()
    ]


def offload_runs() -> list[Record]:
    """Steps that were measured, and the same step of the resident model where they were taken in turns."""

    def same(run: Record) -> tuple[Any, ...]:
        return (GPUS.index(run["gpu"]), [*memory.MIXTURES].index(run["model"]), run["tokens"], run["attention_only"],
                -run["rank"], run["optimizer"])  # fmt: skip

    found = [run for run in plain("offload") if "gpu_ms" in run and not run["layers"]]
    resident = {same(run): run["gpu_ms"] for run in found if run["side"] == "resident" and run.get("in_turns")}
    runs = [
        run | {"resident_ms": resident.get(same(run), 0.0) if run.get("in_turns") else 0.0}
        for run in found
        if run["side"] != "again"
    ]
    return sorted(runs, key=lambda run: (*same(run), run["cap"] or math.inf, order(run["offload"])))


def offload_steps() -> list[Record]:
    found, runs = [], offload_runs()
    sources = "\n\n".join(machines([*of_gpu]) for _, of_gpu in itertools.groupby(runs, lambda run: run["gpu"]))
    for run in runs:
        bus, resident = run["fetched"] / run["bus"] * 1e3, run["resident_ms"]
        times = [f"{run['gpu_ms'] / least:.2f}×" for least in (resident, max(resident, bus)) if resident]
        found.append(run | {
            "sources": sources, "what": f"r = {run['rank']}{', attention alone' * run['attention_only']}, {OPTIMIZERS[run['optimizer']]}",
            "capped": f"{run['cap']:g} GiB" if run["cap"] else "none", "said": f'`"{run["offload"]}"`',
            "step": " ".join([f"{run['gpu_ms']:.0f}", *(f"({each})" for each in times[:1])]),
            "bus_ms": f"{bus:.0f} ({run['bus'] / 1e9:.0f})" if bus else "", "of_least": "".join(times[1:]),
            "peaks": " / ".join(f"{run[each]['reserved'] / 2**30:.1f}" for each in ("peak_loading", "peak")),
            "host": f"{run['in_host'] / 2**30:.1f}" if run["in_host"] else "",
        })  # fmt: skip
    return found


OPTIMIZERS = {"adamw8bit": "8-bit AdamW", "adamw": "AdamW"}


def order(setting: str) -> float:
    """From what keeps the least on the GPU to what keeps all."""
    known = {"all": 0.0, "off": math.inf}
    return known[setting] if setting in known else float(setting.removesuffix("GiB"))


def offload_cards() -> list[Record]:
    """The largest budget that fits, measured where a GPU was capped to what this one has for PyTorch, reckoned elsewhere."""
    found, runs = [], offload_runs()
    for (name, mixture), (what, how), card in itertools.product(memory.MIXTURES.items(), TRAINED.items(), CARDS):
        cap = (card * 1e9 - memory.CONTEXT) / 2**30
        ran = [
            run["offload"] for run in runs
            if (run["model"], run["tokens"], run["rank"]) == (name, TOKENS_OF_TABLE, how["rank"]) and abs(run["cap"] - cap) < 0.1
            and run["attention_only"] == (how["where"] == memory.OFF) and run["optimizer"] == "adamw8bit"
        ]  # fmt: skip
        reckoned = mixture.largest(card * 1e9, TOKENS_OF_TABLE, **how)
        fits = f"{reckoned / 2**30:.0f}GiB" if isinstance(reckoned, float) else reckoned
        best = max(ran, key=order, default=None)  # less than what is reckoned says nothing about that
        is_measured = best is not None and (fits is None or order(best) >= order(fits))
        cell = f'**`"{best}"`**' if is_measured else f'`"{fits}"`' if fits else "no"
        found.append({"name": name, "what": what, "card": card, "fits": cell})
    return found


# --- the blocks ---

SUBJECT, TOKENS = (Column("{units}", "{subject}"), Column("{side}", "{against}", {})), Column("tokens", "{length}")
TRL = (Column("{tokens:,} tokens", "{gpu_ms:.1f}\u00a0/\u00a0{wall_ms:.1f}", {}),
       Column("launches, {tokens:,}", "{launches:,}", {"tokens": 2048}), Column("GiB, {tokens:,}", "{peak_gib:.2f}", {}))  # fmt: skip
SIDE, STEP = (Column("ms, GPU time / by the clock", f"{{{field}}}") for field in ("side", "words"))
BLOCKS: dict[str, Callable[[], str]] = {
    "install": install,
    "mixtures-memory": Table(mixtures_memory, (
        Column("model", "{name}"), Column("parameters", "{weights}"), Column("in 16 bits", "{bf16}"), Column("packed", "{packed}"),
        Column("left of {card} GB", "{left}", {}))),
    "chooser": chooser,
    "gains": Table(gains, (*WHO, Column("at", measured_at, {}), *CLOCKS)),
    "results": Table(results, (
        Column(GPUS[0], "{words}"), Column(OURS, "{time} {unit}", {"gpu": GPUS[0], "side": OURS}),
        Column("bitsandbytes {installed[bitsandbytes]}", "{against}", {"gpu": GPUS[0], "side": SIDES[1:3]}),
        Column("Unsloth {installed[unsloth]}", "{against}", {"gpu": GPUS[0], "side": SIDES[3]}))),
    "dequantize": Table(lambda: sorted(records("bench", section="dequantize", subject=tuple(SHAPES)),
                                       key=lambda record: record["nbytes"]), SUBJECT, above=MACHINES),
    "dequantize-matmul": Table(
        lambda: [record for record in records("bench", section="dequantize + matmul") if record["ratio"]],
        (Column("how many times as fast as", "{side}"), Column("[{gpu}](data/{file})", ratios, {}))),
    "host": Table(partial(records, "bench", section="host"), SUBJECT, above=MACHINES),
    "challenge": Table(partial(records, "challenge", what="total"), SUBJECT, above=MACHINES),
    "generation": Table(partial(records, "generate"), SUBJECT, above=MACHINES),
    "cache": Table(cached, (
        Column("ms", "{who}"), TOKENS, Column(UNPATCHED, "{time}", UNCACHED | {"side": UNPATCHED}),
        Column("{setting}", "{time}", {"side": OURS}), Column(DENSE, "{time}", UNCACHED | {"side": DENSE})),
        above=MACHINES),
    "matmul": Table(partial(records, "matmul", side=BITSANDBYTES), (
        Column("rows of X", "{m:,}"), Column("{section}", "{won}", {})), above=MACHINES),
    "experts-4bit": Table(partial(records, "step-experts-4bit", section="frozen experts"), (
        Column("ms, GiB", "{who} {length}"), Column("{side}", "{time}, {memory}", {"side": (OURS, "cached")}),
        Column("{side}", "{against}, {memory}", {"side": "transformers' forward"})), above=MACHINES),
    "fits": Table(partial(cached, gpu=GPUS[0], side=UNPATCHED), (
        Column("model, tokens", "{who} {length}"), Column("all weights take", "{notes[cache]}", CACHED),
        Column("no cache", "{times}", UNCACHED), Column("16 GB", partial(fits, 16e9), {}),
        Column("24 GB", partial(fits, 24e9), {}), Column("48 or 80 GB", partial(fits, 48e9), {}))),
    "every-mixture": Table(every_mixture, (
        Column("in transformers.models", "{name}", {}, ", "), Column("packed", "{packed}"),
        Column("saved and loaded again", "{reload}"), Column("LoRA by the usual `target_modules`", "{tutorial}"),
        Column("LoRA by `target_parameters`", "{parameters}"), Column("merged", "{merge}"),
        Column("dequantized and saved", "{export}")),
        above="transformers {releases[transformers]}, peft {releases[peft]}, bitsandbytes {releases[bitsandbytes]}, "
              "torch {releases[torch]} ([mixtures.json](data/mixtures.json)):"),
    "instructions": Table(lambda: [{**load("instructions.json"), **row} for row in load("instructions.json")["kernels"]], (
        Column("result", "{dtype}"), Column("{kernel}", lambda found: span([row["instructions"] for row in found], ""), {})),
        above="Triton {triton}, sm_75 to sm_120 ([instructions.json](data/instructions.json)):"),
    "releases": Table(releases, (
        Column("on", "{place}"), Column("runs", lambda found: str(len(found)), {}),
        *(Column(name, partial(each, name), {}) for name in SHOWN), Column("result", "{result}"))),
    "requirements": requirements,
    "recipe": Table(partial(recipe, "step-trl", DENSE_RECIPE), (STEP, *TRL), above=MACHINES),
    "recipe-compiled": Table(partial(recipe, "step-compiled", DENSE_RECIPE), (STEP, *TRL), above=MACHINES),
    "recipe-moe": Table(partial(recipe, "step-moe-trl", MOE_RECIPE), (STEP, *TRL), above=MACHINES),
    "offload-parts": Table(offload_parts, (
        Column("GB", "{name}"), Column("packed experts", "{experts}"), Column('of which `"all"` keeps on the GPU', "{buffers}"),
        Column("all other weights", "{others}"), Column(f"at work on {TOKENS_OF_TABLE:,} tokens", "{activations}"))),
    "offload-learning": Table(offload_learning, (Column("GB", "{how}"), Column("{name}", "{size}", {}))),
    "offload-cards": Table(offload_cards, (
        Column("model", "{name}"), Column("LoRA", "{what}"), Column("{card} GB", "{fits}", {}))),
    "offload": Table(offload_steps, (
        Column("GPU", "{gpu}"),
        Column("model, tokens", "{model}, {tokens:,}"), Column("LoRA", "{what}"), Column("GPU capped", "{capped}"),
        Column("`offload=`", "{said}"), Column("step, ms (× resident)", "{step}"), Column("kernels alone, ms", "{kernels_ms:.0f}"), Column("bus alone, ms (GB/s)", "{bus_ms}"),
        Column("× the larger of the two", "{of_least}"), Column("peak loading / training, GiB", "{peaks}"),
        Column("in host memory, GiB", "{host}")), above="{sources}"),
    "step-trl": Table(partial(plain, "step-trl"), (SIDE, *TRL), above=MACHINES),
    "step-moe-trl": Table(partial(plain, "step-moe-trl"), (SIDE, *TRL), above=MACHINES),
}  # fmt: skip
