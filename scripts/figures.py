"""What README and docs show of docs/data/*.json: tables. scripts/render_docs.py puts them in their places.

A figure is shown only if it is in a data file; docs/data/README.md says which command writes which.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"
GPUS = ("H200", "H100")  # that figures were taken on, the first where only one is shown
OURS, BITSANDBYTES, UNPATCHED, STOCK = "nf4_patch", "bitsandbytes", "unpatched", "stock"
CALLS = "kernel calls a step"  # a note of a step
DENSE = "16-bit weights"
CACHED = " and everything cached"  # of a mixture of experts
PEFT, THEIRS = "peft, experts in 16 bits", "transformers' forward"  # what LoRA on experts is compared with
GPU_TIME = "GPU time"
SETTINGS = (UNPATCHED, "patch", "cache 1/2", "cache all")  # of a step, in the order of its table
CACHE_PARTS = ("cache 1/4", "cache 1/2", "cache 3/4", "cache all")
UNITS = {"us": "µs"}
LIMITS = ("ceiling", "device copy", "torch.empty", "read", DENSE)  # what ours is held against
# data file of a training step -> who trains; the last word is the distribution whose release is shown
STEPS = {
    "step-peft-GPU.json": "peft, bitsandbytes",
    "step-unsloth-2026.9.7-GPU.json": "Unsloth",
    "step-unsloth-GPU.json": "Unsloth",
}
# data file -> (the command that writes it, what is in it); GPU in a name stands for h200, h100
SOURCES = {
    "bench-GPU.json": ("python -m benchmarks.dequantize", "dequantization, dequantization before a matmul, host time"),
    "challenge-GPU.json": ("python -m benchmarks.challenge", "the public NF4 challenge"),
    "step-peft-GPU.json": ("nf4-patch bench --step peft", "a QLoRA step of peft and bitsandbytes"),
    "step-unsloth-GPU.json": ("python -m benchmarks.unsloth_step", "a QLoRA step of the newest Unsloth"),
    "step-unsloth-2026.9.7-GPU.json": ("python -m benchmarks.unsloth_step", "the same with Unsloth 2026.9.7 installed"),
    "step-cache-GPU.json": ("python -m benchmarks.cache", "GPU time of a step by the size of the weight cache"),
    "step-moe-GPU.json": (
        "python -m benchmarks.experts",
        "mixtures of experts: a QLoRA step with peft, and generation",
    ),
    "step-experts-4bit-GPU.json": (
        "python -m benchmarks.experts_4bit",
        'mixtures of experts with `experts="4bit"`: LoRA on the experts, and frozen experts',
    ),
    "step-experts-kernels-GPU.json": (
        "python -m benchmarks.experts_kernels",
        "where the GPU time of a mixture's step goes, next to Unsloth's; with the newest transformers",
    ),
    "matmul-GPU.json": ("python -m benchmarks.matmul", "the fused matmul by rows of X"),
    "generate-GPU.json": ("python -m benchmarks.generation", "tokens a second with the fused matmul"),
    "grpo-GPU.json": ("python -m benchmarks.grpo", "RL with TRL's GRPO: tokens a second in generation, time of a step"),
    "verify-GPU.json": ("nf4-patch verify", "the kernel against bitsandbytes, every layout"),
    "verify-sm75-GPU.json": ("python scripts/check_kernel.py older-gpu sm_75", "the code of a T4, run on this GPU"),
    "fuzz-GPU.json": ("python scripts/check_kernel.py fuzz 10000 --seed 1", "random and malformed states"),
    "instructions.json": (
        "python scripts/check_kernel.py instructions --all",
        "machine code of the kernel by architecture; needs no GPU",
    ),
    "mixtures.json": (
        "python scripts/mixtures.py",
        "what can be done with every mixture of transformers, packed; needs no GPU",
    ),
    "releases.json": ("python scripts/release_matrix.py", "releases of the patched libraries that were run"),
}


# --- data ---


def load(name: str) -> Any:
    file = DATA / name
    return json.loads(file.read_text()) if file.exists() else None


def of_gpus(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(GPU, file, data) of a file whose name has GPU in it, for each GPU that has one."""
    for gpu in GPUS:
        file = name.replace("GPU", gpu.lower())
        if data := load(file):
            yield gpu, file, data


def figures(name: str, gpu: str = GPUS[0]) -> list[dict[str, Any]]:
    """Every row of a data file; none where it has not been measured."""
    data = load(name.replace("GPU", gpu.lower())) or {"sections": {}}
    return [row for rows in data["sections"].values() for row in rows]


def release(name: str, distribution: str) -> str:
    data = load(name.replace("GPU", GPUS[0].lower()))
    return data["machine"]["releases"].get(distribution, "") if data else ""


def conditions(gpu: str, file: str, data: dict[str, Any]) -> str:
    """The machine of a table, in a line above it."""
    machine = data["machine"]
    shown = ("torch", "triton", BITSANDBYTES, "unsloth", "transformers", "peft")
    releases = ", ".join(f"{name} {machine['releases'][name]}" for name in shown if name in machine["releases"])
    return f"**{gpu}** ({machine['date']}; {releases}; [{file}](data/{file})):"


# --- Markdown ---


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row).replace("|  ", "| ") + " |" for row in (heading, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heading), *lines[1:]])


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def times(ratio: float | None) -> str:
    return "check failed" if ratio is None else f"{ratio:.2f}×"


def span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}×"
    return high if f"{low}×" == high else f"{low} to {high}"


def shape(text: str) -> str:
    return re.sub(r"(\d)x(\d)", r"\1×\2", text)


def cell(row: dict[str, Any], name: str) -> str:
    """A variant's time and how many times ours is as fast, in italics where that is not clear; of a limit, the part that ours
    reaches."""
    if name not in row["median"]:
        return ""
    ratio = row["ratio"].get(name)
    part = f"{100 * ratio:.0f} %" if ratio and name in LIMITS else ""
    text = f"{digits(row['median'][name])} ({part or times(ratio)})"
    return text if part or not ratio else marked(text, row, name)


def comparison(rows: list[dict[str, Any]]) -> str:
    """A row a subject, a column a variant: ours, the limits, the others."""
    names = [name for name in dict.fromkeys(n for row in rows for n in row["median"]) if name != OURS]
    names.sort(key=lambda name: name not in LIMITS)
    unit = ", ".join(dict.fromkeys(UNITS.get(row["unit"], row["unit"]) for row in rows))
    body = [[shape(r["subject"]), digits(r["median"][OURS]), *(cell(r, name) for name in names)] for r in rows]
    return table((unit, OURS, *names), body)


def on_one_gpu(name: str, shown: Callable[[dict[str, Any]], str], in_brief: Callable[[dict[str, Any]], str]) -> str:
    """The table of the first GPU that a data file is of; of each other GPU a line, with a link to its figures."""
    parts = []
    for gpu, file, data in of_gpus(name):
        if not parts:
            parts.append(f"{conditions(gpu, file, data)}\n\n{shown(data)}")
        else:
            source = f"{gpu} ([{file}](data/{file}) of {data['machine']['date']})"
            parts.append(f"{source}, how many times as fast: {in_brief(data)}.")
    return "\n\n".join(parts) or "Not measured yet."


def spans(rows: Sequence[dict[str, Any]]) -> str:
    """By variant, from the smallest to the largest ratio of these rows."""
    names = [name for name in dict.fromkeys(n for row in rows for n in row["ratio"]) if name not in LIMITS]
    ratios = {name: [row["ratio"][name] for row in rows if row["ratio"].get(name)] for name in names}
    return ", ".join(f"{span(found)} {name}" for name, found in ratios.items() if found)


def measured(name: str, section: str, keep: str = "", sizes: bool = False) -> Callable[[], str]:
    """A block: the section of a data file. ``sizes``: of weights of the same number of elements the first, smallest first."""

    def rows_of(data: dict[str, Any]) -> list[dict[str, Any]]:
        rows = [row for row in data["sections"].get(section, []) if keep in row["subject"]]
        if not sizes:
            return rows
        by_size = {math.prod(map(int, row["subject"].split()[0].split("x"))): row for row in reversed(rows)}
        return [by_size[size] for size in sorted(by_size)]

    return lambda: on_one_gpu(name, lambda data: comparison(rows_of(data)), lambda data: spans(rows_of(data)))


def releases() -> str:
    """What was run with which releases, a row a result: how many calls the kernel served, and whether every bit was equal."""
    shown = ("torch", "triton", BITSANDBYTES, "unsloth", "transformers", "peft", "wrapt")
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for run in load("releases.json"):
        if "error" in run:
            continue
        installed = {**run["releases"], **({} if "unsloth" in run else {"unsloth": ""})}
        parts = [run["step"], run.get("unsloth", {})]
        hits = sum(n for part in parts for n in part.get("hits", {}).values())
        ran = [part for part in parts if "error" not in part]
        equal = run["states"]["equal"] == run["states"]["cases"] and all(part.get("equal", True) for part in ran)
        place = "CPU" if "CPU" in run["place"] else run["place"].removeprefix("NVIDIA ").split(" (")[0]
        verdict = f"{run['states']['cases']} states, {hits} calls: {'equal' if equal else 'DIFFERENT'}"
        if place == "CPU":
            verdict += "; bitsandbytes agrees on {agreed} of {asked}".format(**run["states"])
        if ran != parts:
            verdict += "; the step fails without the patch too"
        found = {name: installed.get(name, "").split("+")[0] for name in shown}
        groups.setdefault((place, verdict), []).append(found)
    rows = []
    for (place, verdict), runs in groups.items():
        cells = [", ".join(sorted({run[name] for run in runs} - {""}, key=numbers)) for name in shown]
        rows.append((place, str(len(runs)), *cells, verdict))
    return table(("on", "runs", *shown, "bits"), rows)


def numbers(release: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", release)]


def verified() -> str:
    """A row a run of verify or the fuzzer, on the first GPU that has one: cases, elements, and what differed."""
    rows = []
    for pattern, (command, content) in SOURCES.items():
        if not pattern.startswith(("verify", "fuzz")):
            continue
        for _, file, data in itertools.islice(of_gpus(pattern), 1):
            parts = data.get("rows", [data])
            cases, elements = (sum(part[name] for part in parts) for name in ("cases", "elements"))
            differing = sum(part.get("differing", 0) for part in parts) + len(data.get("mismatches", ()))
            outside = f", {len(data['out_of_bounds'])} writes outside a buffer" if "out_of_bounds" in data else ""
            found = f"{differing} differing{outside}"
            rows.append(
                (f"{content} (`{command}`)", f"[{data['place']}](data/{file})", f"{cases:,}", f"{elements:,}", found)
            )
    return table(("what", "on", "cases", "elements", "found"), rows) if rows else "Not recorded yet."


def instructions() -> str:
    """By dtype, from the fewest to the most of all architectures."""
    data = load("instructions.json")
    counts: dict[tuple[str, str], list[float]] = {}
    for row in data["kernels"]:
        counts.setdefault((row["dtype"], row["kernel"]), []).append(row["instructions"])
    archs = ", ".join(dict.fromkeys(row["arch"] for row in data["kernels"]))
    rows = [
        (
            dtype,
            *(
                f"{min(counts[dtype, kernel]):.2f} to {max(counts[dtype, kernel]):.2f}"
                for kernel in (OURS, BITSANDBYTES)
            ),
        )
        for dtype in ("float16", "bfloat16", "float32")
    ]
    shown = table(("result", OURS, BITSANDBYTES), rows)
    return f"Triton {data['triton']}, {archs} ([instructions.json](data/instructions.json)):\n\n{shown}"


def in_brief(name: str, section: str) -> Callable[[], str]:
    """A block: how many times as fast ours is in a section of a data file, a line a GPU."""

    def block() -> str:
        found = [(gpu, file, spans(data["sections"].get(section, []))) for gpu, file, data in of_gpus(name)]
        return "; ".join(f"{gpu} ([{file}](data/{file})) {ratios}" for gpu, file, ratios in found) + "."

    return block


def matmul() -> str:
    """Ours in µs and how many times it is as fast as bitsandbytes, by rows of X and weight."""

    def shown(data: dict[str, Any]) -> str:
        by_size = {(r["sizes"]["m"], name): r for name, rows in data["sections"].items() for r in rows}
        weights = list(data["sections"])
        rows = []
        for m in dict.fromkeys(m for m, _ in by_size):
            cells = [by_size.get((m, weight)) for weight in weights]
            rows.append([f"{m:,}", *map(mark, cells)])
            if all(row and row["notes"].get("fused") == "no" for row in cells):
                break  # from there on the fused matmul takes none
        return table(("rows of X", *(shape(weight).removesuffix(" bf16") for weight in weights)), rows)

    def in_brief(data: dict[str, Any]) -> str:
        rows = [row for rows in data["sections"].values() for row in rows]
        fused = [row for row in rows if row["notes"].get("fused") != "no"]
        others = [row for row in rows if row not in fused]
        ratios = [span([row["ratio"][BITSANDBYTES] for row in part]) for part in (fused, others)]
        return f"{ratios[0]} where the fused matmul runs, {ratios[1]} elsewhere"

    return on_one_gpu("matmul-GPU.json", shown, in_brief)


def mark(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    text = f"{digits(row['median'][OURS])} ({times(row['ratio'].get(BITSANDBYTES))})"
    return text if row["notes"].get("fused") != "no" else f"*{text}*"


def clear(row: dict[str, Any], ratio: float | None, other: str = UNPATCHED) -> bool:
    """Whether the patch served a step, and made a difference that is more than noise: more than each side differs from
    itself in that run, and the same way in four rounds of five."""
    if not ratio or (row["notes"].get(CALLS) == "0" and "cache" not in row["notes"]):
        return False
    rounds = list(zip(row["times"][OURS], row["times"][other], strict=True))
    median = row["median"]
    same_way = sum((a < b) == (median[OURS] < median[other]) for a, b in rounds)
    noise = max(row["noise"][OURS], row["noise"][other])
    return abs(ratio - 1) > noise and same_way >= 0.8 * len(rounds)


def marked(text: str, row: dict[str, Any], other: str = UNPATCHED) -> str:
    """In italics where the difference is not clear."""
    return text if clear(row, row["ratio"].get(other), other) else f"*{text}*"


def parts_of(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Of a step's subject: who, batch x tokens, the setting of the cache or of checkpointing, the clock."""
    first, *others = row["subject"].split(", ")
    who, _, length = first.rpartition(" ")
    clock = others.pop() if others and others[-1] == GPU_TIME else ""
    return who, shape(length), others[0] if others else "", clock


def steps() -> str:
    """A row a trainer and length, a column a setting of the cache; wall time and GPU time, in italics what is not clear. One
    GPU, a line for each other."""
    parts = []
    for gpu in GPUS:
        found = [(who, file, data) for name, who in STEPS.items() for g, file, data in of_gpus(name) if g == gpu]
        if not found:
            continue
        files = ", ".join(f"[{file}](data/{file}) of {data['machine']['date']}" for _, file, data in found)
        shown = step_table(found) if not parts else f"{gpu} ({files}): {steps_in_brief(found)}."
        parts.append(shown if parts else f"**{gpu}** ({files}):\n\n{shown}")
    return "\n\n".join(parts) or "Not measured yet."


Steps = list[tuple[str, str, dict[str, Any]]]  # who trains, data file, data


def step_table(found: Steps) -> str:
    body: dict[tuple[str, str], dict[str, list[str]]] = {}
    for who, _, data in found:
        release = data["machine"]["releases"].get(who.split()[-1].lower(), "")
        for row in sorted(data["sections"]["step"], key=lambda row: parts_of(row)[3]):  # wall time before GPU time
            _, length, setting, _ = parts_of(row)
            shown = f"{digits(row['median'][OURS])} ({times(row['ratio'][UNPATCHED])})"
            cells = body.setdefault((f"{who} {release}".strip(), length), {})
            cells.setdefault(setting or "patch", []).append(marked(shown, row))
            if not setting:
                cells.setdefault(UNPATCHED, []).append(digits(row["median"][UNPATCHED]))
    columns = sorted({name for cells in body.values() for name in cells}, key=SETTINGS.index)
    rows = [[*key, *(" / ".join(cells.get(name, [])) for name in columns)] for key, cells in body.items()]
    return table(("ms, wall time / GPU time", "tokens", *columns), rows)


def steps_in_brief(found: Steps) -> str:
    rows = [row for _, _, data in found for row in data["sections"]["step"]]
    some = "" if any(clear(row, row["ratio"][UNPATCHED]) for row in rows) else "no clear difference, "
    who = " and ".join(dict.fromkeys(who for who, _, _ in found))
    return f"{who}, wall time, {some}{span([row['ratio'][UNPATCHED] for row in rows])}"


def cache_rows(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(model, batch x tokens, setting of the cache, row) of whole models; without settings that are gone."""
    found = [(*parts_of(row)[:3], row) for row in rows]
    return [each for each in found if each[2] in (*CACHE_PARTS, "") and "layers" not in each[0]]


def cache() -> str:
    """GPU time of a step by the setting of the cache; the last column is the aim."""

    def shown(data: dict[str, Any]) -> str:
        body: dict[tuple[str, str], dict[str, str]] = {}
        for who, length, setting, row in cache_rows(data["sections"]["step"]):
            cells = body.setdefault((who, length), {"unpatched": digits(row["median"][UNPATCHED])})
            cells[setting or "patch"] = digits(row["median"][OURS])
            cells[DENSE] = cells.pop(DENSE, digits(row["median"][DENSE]))
        heading = ["ms", "tokens", *next(iter(body.values()))]
        return table(heading, [[who, length, *cells.values()] for (who, length), cells in body.items()])

    def in_brief(data: dict[str, Any]) -> str:
        ratios: dict[str, list[float]] = {}
        for _, _, setting, row in cache_rows(data["sections"]["step"]):
            ratios.setdefault(setting, []).append(row["ratio"][UNPATCHED])
        return f"without a cache {span(ratios[''])}, with everything cached {span(ratios['cache all'])}"

    return on_one_gpu("step-cache-GPU.json", shown, in_brief)


def experts() -> str:
    """GPU time of steps and of generation, by how many times it is as fast: a line a GPU."""

    def in_brief(data: dict[str, Any]) -> str:
        rows = [row for row in data["sections"]["step"] if row["subject"].endswith(GPU_TIME)]
        kinds = ("checkpointing", f"checkpointing{CACHED}", "no checkpointing")
        found = {kind: [row["ratio"][UNPATCHED] for row in rows if parts_of(row)[2] == kind] for kind in kinds}
        found["generation"] = [row["ratio"][UNPATCHED] for row in rows if row["subject"].startswith("generation")]
        return ", ".join(f"{kind} {span(ratios)}" for kind, ratios in found.items() if ratios)

    lines = (
        f"* {gpu} ([{file}](data/{file}) of {data['machine']['date']}): {in_brief(data)}."
        for gpu, file, data in of_gpus("step-moe-GPU.json")
    )
    return "\n".join(lines)


def experts_4bit() -> str:
    """A table a section: GPU time of a step, and its peak memory, by what is compared."""

    def shown(data: dict[str, Any]) -> str:
        parts = []
        for section, rows in data["sections"].items():
            names = [name for name in rows[0]["median"] if name != OURS]
            body = []
            for row in rows:
                memory = (row["notes"][f"peak memory, {name}"].removesuffix(" GiB") for name in (OURS, *names))
                figures = (
                    cell(row, name) if name in (PEFT, THEIRS) else digits(row["median"][name])
                    for name in (OURS, *names)
                )
                times_and_sizes = (f"{figure}, {size}" for figure, size in zip(figures, memory, strict=True))
                body.append([shape(row["subject"].partition(",")[0]), *times_and_sizes])
            parts.append(f"{section[0].upper()}{section[1:]}:\n\n{table(('ms, GiB', OURS, *names), body)}")
        return "\n\n".join(parts)

    def in_brief(data: dict[str, Any]) -> str:
        return "; ".join(f"{section} {spans(rows)}" for section, rows in data["sections"].items())

    return on_one_gpu("step-experts-4bit-GPU.json", shown, in_brief)


def experts_kernels() -> str:
    """What the largest parts of the longest step with LoRA take, of the sides that are compared, a line each."""

    def shown(data: dict[str, Any]) -> str:
        row = data["sections"]["LoRA on experts"][-1]
        parts = {kind: dict(part.rsplit(" ", 1) for part in note.split(", ")) for kind, note in row["notes"].items()}
        lines = []
        for side, total in row["median"].items():
            if side not in (OURS, "no checkpointing", "unsloth"):
                continue
            taken = {kind: float(sides[side]) for kind, sides in parts.items() if side in sides}
            largest = sorted(taken, key=lambda kind: -taken[kind])[:7]
            lines.append(f"* {side}: {total:.1f} ms; " + ", ".join(f"{kind} {taken[kind]:.1f}" for kind in largest))
        return "\n".join(lines)

    return on_one_gpu("step-experts-kernels-GPU.json", shown, lambda data: "")


def grpo() -> str:
    """With how far runs of one side lie apart: they are few."""
    rows = figures("grpo-GPU.json")
    noise = max((value for row in rows for value in row["noise"].values()), default=0)
    runs = f"{len(rows[0]['times'][OURS])} runs a side, which differ by up to {noise:.0%}." if rows else ""
    return f"{measured('grpo-GPU.json', 'grpo')()}\n\n{runs}"


def data_files() -> str:
    rows = []
    for pattern, (command, content) in SOURCES.items():
        option = "" if "release_matrix" in command else f" --json docs/data/{pattern}"
        rows.append((f"`{pattern}`", f"`{command}{option}`", content))
    return table(("file", "written by", "what is in it"), rows)


def every_mixture() -> str:
    """A row for all mixtures with which the same can be done, the most first."""
    data = load("mixtures.json")
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in data["mixtures"].items():
        alike.setdefault(tuple(row.values()), []).append(name)
    rows = [(", ".join(names), *found) for found, names in sorted(alike.items(), key=lambda item: -len(item[1]))]
    heading = ("in transformers.models", "packed", "saved and loaded again", "LoRA by the usual `target_modules`",
               "LoRA by `target_parameters`", "merged", "dequantized and saved")  # fmt: skip
    releases = ", ".join(f"{name} {release}" for name, release in data["releases"].items())
    return f"{releases} ([mixtures.json](data/mixtures.json)):\n\n{table(heading, rows)}"


BLOCKS: dict[str, Callable[[], str]] = {
    "data": data_files,
    "every-mixture": every_mixture,
    "releases": releases,
    "instructions": instructions,
    "verified": verified,
    "dequantize": measured("bench-GPU.json", "dequantize", "bf16", sizes=True),
    "dequantize-matmul": in_brief("bench-GPU.json", "dequantize + matmul"),
    "host": measured("bench-GPU.json", "host"),
    "challenge": measured("challenge-GPU.json", "challenge", "total"),
    "steps": steps,
    "cache": cache,
    "experts": experts,
    "experts-4bit": experts_4bit,
    "experts-kernels": experts_kernels,
    "matmul": matmul,
    "generation": measured("generate-GPU.json", "generation"),
    "grpo": grpo,
}
