"""What the README and "Will it help me" say at a glance, from docs/data/*.json: what to type, what a user gains, on which GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from figures import (
    BITSANDBYTES,
    CACHED,
    CALLS,
    GPU_TIME,
    GPUS,
    OURS,
    PEFT,
    STOCK,
    UNITS,
    UNPATCHED,
    cache_rows,
    cell,
    clear,
    digits,
    figures,
    load,
    marked,
    of_gpus,
    parts_of,
    release,
    shape,
    span,
    table,
    times,
)

# compute capability -> GPUs that people know
ARCHITECTURES = {
    "75": "Tesla T4, RTX 2080",
    "80": "A100",
    "86": "A10, RTX 3090",
    "89": "L4, L40S, RTX 4090",
    "90": "H100, H200",
    "100": "B200",
    "120": "RTX 5090",
}


class Gain(NamedTuple):
    tokens: int  # of a step
    ratio: float  # how many times it is as fast as without the patch
    clear: bool


def gains_of(rows: Iterable[dict[str, Any]]) -> list[Gain]:
    timed = [(row, row["sizes"], row["ratio"].get(UNPATCHED)) for row in rows]
    return [Gain(sizes["batch"] * sizes["tokens"], ratio, clear(row, ratio)) for row, sizes, ratio in timed if ratio]


def step_rows(name: str, gpu: str, setting: str, clock: str = GPU_TIME) -> list[dict[str, Any]]:
    """Of the first model in the file; ``setting``: of the cache, or of checkpointing; no clock: wall time."""
    rows = [row for row in figures(name, gpu) if "tokens" in row["sizes"]]
    first = parts_of(rows[0])[0] if rows else ""
    return [row for row in rows if parts_of(row)[::2] == (first, setting) and parts_of(row)[3] == clock]


def step_gain(name: str, gpu: str, setting: str = "") -> str:
    """In GPU time; in wall time, and said to be so, where a file has no other."""
    rows = step_rows(name, gpu, setting)
    if not setting and {row["notes"].get(CALLS) for row in rows} == {"0"}:
        return "nothing without a cache: the kernel is not called"
    wall = [] if rows else step_rows(name, gpu, setting, "")
    return describe(gains_of(rows or wall)) + ", wall time" * bool(wall)


def lora_gain(name: str, gpu: str) -> str:
    """LoRA on experts: against peft's own on experts in 16 bits."""
    found = [(row, row["ratio"].get(PEFT)) for row in figures(name, gpu)]
    gains = [Gain(row["sizes"]["tokens"], ratio, clear(row, ratio, PEFT)) for row, ratio in found if ratio]
    return describe(gains) + ", LoRA on experts" * bool(gains)


def unchecked_experts_gain(name: str, gpu: str) -> str:
    """Without checkpointing: what the second dequantization costs, and the memory that it saves."""
    rows = step_rows(name, gpu, "no checkpointing")
    if not rows:
        return ""
    ours, stock = (float(part.split()[0]) for part in rows[0]["notes"]["peak memory"].rstrip(")").split(" (unpatched "))
    return f"{step_gain(name, gpu, 'no checkpointing')}, and {(stock - ours) / 2:.1f} GiB less memory a layer"


def describe(gains: Sequence[Gain]) -> str:
    """A step's gains in words; what is not clear is said to be so."""
    if gains and not any(gain.clear for gain in gains):
        return f"not clear ({span([gain.ratio for gain in gains])})"
    parts = [f"{times(gain.ratio)} at {gain.tokens:,}" for gain in gains if gain.clear]
    rest = " and ".join(f"{gain.tokens:,}" for gain in gains if not gain.clear)
    return ", ".join(parts) + " tokens a step" * bool(parts) + f", not clear at {rest}" * bool(rest)


def generation_gain(name: str, gpu: str) -> str:
    rows = [row for row in figures(name, gpu) if row["ratio"].get(STOCK) and row["subject"].endswith("compiled")]
    found = [
        (row["sizes"]["batch"], ratio, clear(row, ratio, STOCK)) for row in rows for ratio in [row["ratio"][STOCK]]
    ]
    parts = ", ".join(f"{times(ratio) if sure else 'not clear'} at batch {batch}" for batch, ratio, sure in found)
    return parts + " (compiled)" * bool(rows)


def rollout_gain(name: str, gpu: str) -> str:
    """Of generation and of the whole step, where it is clear."""
    found = [(row["subject"].partition(",")[0], row, row["ratio"].get(UNPATCHED)) for row in figures(name, gpu)[:2]]
    return ", ".join(f"{what} {times(ratio)}" for what, row, ratio in found if clear(row, ratio) and ratio > 1)


SETUPS = {  # what a user does: what to type, what it gains, the data file
    "peft or TRL": ("`enable()`", step_gain, "step-peft-GPU.json"),
    "peft or TRL, memory to spare": (
        '`enable(cache="auto")`',
        partial(step_gain, setting="cache all"),
        "step-peft-GPU.json",
    ),
    "a mixture of experts, peft": ('`enable(experts="4bit")`', lora_gain, "step-experts-4bit-GPU.json"),
    "Unsloth up to 2026.9": ("`enable()`", step_gain, "step-unsloth-2026.9.7-GPU.json"),
    "Unsloth from 2026.10 on, PyTorch ≥ 2.11": (
        '`enable(cache="auto")`',
        partial(step_gain, setting="cache all"),
        "step-unsloth-GPU.json",
    ),
    "4-bit generation": ('`enable(matmul="auto")`', generation_gain, "generate-GPU.json"),
}
MORE_SETUPS = {  # on the page "Will it help me" alone
    "packed experts, LoRA on the attention": (
        "`enable()`",
        partial(step_gain, setting="checkpointing"),
        "step-moe-GPU.json",
    ),
    "Unsloth from 2026.10 on": ("`enable()`", step_gain, "step-unsloth-GPU.json"),
    "packed experts, memory to spare": (
        '`enable(cache="auto")`',
        partial(step_gain, setting=f"checkpointing{CACHED}"),
        "step-moe-GPU.json",
    ),
    "packed experts without gradient checkpointing": (
        "`enable()`",
        unchecked_experts_gain,
        "step-moe-GPU.json",
    ),
    "RL with TRL's GRPO, the model itself generates": ('`enable(matmul="auto")`', rollout_gain, "grpo-GPU.json"),
}


def chooser() -> str:
    """What you train with, what you type, what you gain: on the first GPU."""
    rows = [(who, typed, gain(name, GPUS[0])) for who, (typed, gain, name) in SETUPS.items()]
    rows += [
        ("on a GPU older than a T4, AMD, Intel, Apple", "", "nothing: the originals run"),
        ("on your GPU", "`nf4-patch bench --step peft`", "tells you in a minute"),
    ]
    return table(("what you train with", "what you type", f"what you gain on an {GPUS[0]} (steps: GPU time)"), rows)


def gains() -> str:
    """A row for each setup that was measured, a column for each GPU."""
    setups = (SETUPS | MORE_SETUPS).items()
    found = [[who, typed, *(gain(name, gpu) for gpu in GPUS)] for who, (typed, gain, name) in setups]
    return table(
        ("what you train with", "what you type", *(f"gain on an {gpu}" for gpu in GPUS)),
        [row for row in found if any(row[2:])],
    )


def headline() -> str:
    """One figure and its conditions."""
    row = step_rows("step-peft-GPU.json", GPUS[0], "")[0]
    cached = step_rows("step-peft-GPU.json", GPUS[0], "cache all")[0]
    tokens = row["sizes"]["batch"] * row["sizes"]["tokens"]
    ours, theirs, kept = (
        digits(each) for each in (row["median"][OURS], row["median"][UNPATCHED], cached["median"][OURS])
    )
    ratio, with_cache = (times(each["ratio"][UNPATCHED]) for each in (row, cached))
    return (
        f"A training step of {tokens} tokens takes {ours} ms of GPU time instead of {theirs} ({ratio}), "
        f"{kept} with cached weights ({with_cache}): peft, four layers of Llama-3.1-8B with random weights, {GPUS[0]}."
    )


GIB = 2**30
MEMORIES = {"16 GB": 16e9, "24 GB": 24e9, "48 or 80 GB": 48e9}
MARGIN, MARGIN_PART = 2**29, 1 / 24  # what cache="auto" leaves free, as in patching/cache/auto.py
PARTS = {"cache all": "all weights", "cache 3/4": "3/4 of them", "cache 1/2": "1/2", "cache 1/4": "1/4", "": "none"}


def models() -> dict[tuple[str, str], dict[str, Any]]:
    """Of whole models, by (model, batch x tokens): the rows of their steps, by the setting of the cache."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for who, length, setting, row in cache_rows(figures("step-cache-GPU.json")):
        found.setdefault((who, length), {})[setting] = row
    return found


def room(memory: float) -> float:
    return memory - memory * MARGIN_PART - MARGIN


def fits() -> str:
    """The largest cache of a measured step that a GPU has room for, and the GPU time that this step gained."""
    rows = []
    for (who, length), settings in models().items():
        cells = [times(settings[""]["ratio"][UNPATCHED])]
        for memory in MEMORIES.values():
            setting = next((part for part in PARTS if part in settings and peak(settings[part]) <= room(memory)), None)
            gain = "" if setting is None else times(settings[setting]["ratio"][UNPATCHED])
            cells.append("no room" if setting is None else f"{PARTS[setting]}: {gain}")
        rows.append((f"{who} {length}", settings["cache all"]["notes"]["cache"], *cells))
    return table(("model, tokens", "all weights take", "no cache", *MEMORIES), rows)


def fits_case() -> str:
    """The arithmetic of one cell of ``fits``."""
    row, memory = models()["Llama-3.1-8B", shape("1x512")]["cache all"], MEMORIES["24 GB"]
    steps = [f"{part / GIB:.1f}" for part in (peak(row), memory, memory * MARGIN_PART, MARGIN, room(memory))]
    verdict = "all weights fit" if peak(row) <= room(memory) else "not all weights fit"
    return (
        "With all weights cached its step of {} tokens peaks at {} GiB. 24 GB are {} GiB; less {} and {} GiB that "
        '`"auto"`\nleaves free, {} GiB are left: {}.'
    ).format(row["sizes"]["tokens"], *steps, verdict)


class Mixture(NamedTuple):
    """The shapes of a mixture of experts, as in its configuration on the Hub."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    inner: int  # of an expert
    vocabulary: int

    def packed(self) -> int:
        """Parameters of experts and attention."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.experts * self.hidden * self.inner)

    def others(self) -> int:
        """Of embedding and head, which stay in 16 bits."""
        return 2 * self.vocabulary * self.hidden


MIXTURES = {
    "gpt-oss-20b": Mixture(24, 2880, 64, 8, 64, 32, 2880, 201088),
    "Qwen3-30B-A3B": Mixture(48, 2048, 32, 4, 128, 128, 768, 151936),
    "Mixtral-8x7B": Mixture(32, 4096, 32, 8, 128, 8, 14336, 32000),
    "GLM-4.5-Air": Mixture(45, 4096, 96, 8, 128, 128, 1408, 151552),
}
PACKED = 1 / 2 + 1 / 64 + 4 / 64 / 256  # bytes of a parameter: its code, absmax and the absmax of 256 of those


def mixtures() -> str:
    """What a mixture takes, and what it leaves of a GPU's memory."""
    rows, memories = [], (16, 24, 48, 80)
    for name, shapes in MIXTURES.items():
        parameters, taken = shapes.packed() + shapes.others(), PACKED * shapes.packed() + 2 * shapes.others()
        left = [memory - taken / 1e9 for memory in memories]
        cells = [f"{each:.0f}" if each >= 1 else "no room" for each in left]
        rows.append(
            (name, f"{parameters / 1e9:.0f} billion", f"{2 * parameters / 1e9:.0f}", f"{taken / 1e9:.0f}", *cells)
        )
    return table(("model", "parameters", "in 16 bits", "packed", *(f"left of {each} GB" for each in memories)), rows)


def peak(row: dict[str, Any]) -> float:
    """Bytes, of a step with the patch."""
    return float(row["notes"]["peak memory"].split()[0]) * GIB


def gpus() -> str:
    """Measured, verified or neither, by what there are data files of; a row for each status."""
    counted = {row["arch"].removeprefix("sm_") for row in load("instructions.json")["kernels"]}
    timed: dict[str, list[str]] = {}
    for gpu, _, data in of_gpus("bench-GPU.json"):
        timed.setdefault(data["machine"]["capability"], []).append(gpu)
    verified = [gpu for gpu, _, _ in of_gpus("verify-GPU.json")]
    known: dict[str, list[str]] = {}
    for capability, names in ARCHITECTURES.items():
        status = "machine code checked, **not run**" if capability in counted else "not run"
        if capability in timed:
            both = [gpu for gpu in timed[capability] if gpu in verified]
            status = f"**measured** ({' and '.join(timed[capability])})"
            status += f", verified bit by bit ({' and '.join(both)})" * bool(both)
        elif any(of_gpus(f"verify-sm{capability}-GPU.json")):
            status = "**verified**: its code, run on a newer GPU, gave the same bits; its speed is not measured"
        known.setdefault(status, []).append(f"{names} (sm_{capability})")
    rows = [("; ".join(names), status) for status, names in known.items()]
    return table(("your GPU", "status"), [*rows, ("older, AMD, Intel, Apple, no GPU", "no effect; the originals run")])


def results() -> str:
    """A row for each kind of figure; on the other GPU only the ratios."""
    first, other = GPUS
    fused = "Unsloth Triton"
    rows = []
    for name, subject, words in (
        ("bench-GPU.json", "4096x14336 bf16", "dequantize 4096×14336 to bf16, GPU time"),
        ("bench-GPU.json", "a new tensor", "host time per call"),
        ("challenge-GPU.json", "total", "the public NF4 challenge, 9,000 calls"),
        ("step-peft-GPU.json", "peft 1x512, GPU time", "a QLoRA step of peft, 512 tokens, GPU time"),
    ):
        found = {gpu: next((r for r in figures(name, gpu) if r["subject"] == subject), None) for gpu in GPUS}
        if row := found[first]:
            ours = f"{digits(row['median'][OURS])} {UNITS.get(row['unit'], row['unit'])}"
            ratios = found[other]["ratio"] if found[other] else {}
            elsewhere = " / ".join(
                marked(times(ratios[peer]), found[other], peer)
                for peer in (BITSANDBYTES, UNPATCHED, fused)
                if peer in ratios
            )
            rows.append((words, ours, cell(row, BITSANDBYTES) or cell(row, UNPATCHED), cell(row, fused), elsewhere))
    libraries = (f"{name} {release('bench-GPU.json', name.lower())}" for name in (BITSANDBYTES, "Unsloth"))
    return table((first, OURS, *libraries, f"on an {other}"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "chooser": chooser,
    "gains": gains,
    "fits": fits,
    "fits-case": fits_case,
    "gpus": gpus,
    "mixtures": mixtures,
    "results": results,
}
