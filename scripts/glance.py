"""What the README says at a glance, from docs/data/*.json: what a user gains, on which GPU, and four results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from figures import (
    BITSANDBYTES,
    CACHED,
    CALLS,
    GPU_TIME,
    GPUS,
    OURS,
    STOCK,
    UNITS,
    UNPATCHED,
    cell,
    clear,
    digits,
    figures,
    load,
    of_gpus,
    parts_of,
    release,
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


def step_rows(name: str, gpu: str, setting: str, clock: str = "") -> list[dict[str, Any]]:
    """Of the first model in the file; ``setting``: of the cache, or of checkpointing. Wall time if no clock is named."""
    rows = [row for row in figures(name, gpu) if "tokens" in row["sizes"]]
    first = parts_of(rows[0])[0] if rows else ""
    return [row for row in rows if parts_of(row)[::2] == (first, setting) and parts_of(row)[3] == clock]


def step_gains(name: str, gpu: str, setting: str = "") -> list[Gain]:
    return gains_of(step_rows(name, gpu, setting))


def step_gain(name: str, gpu: str) -> str:
    if {row["notes"].get(CALLS) for row in step_rows(name, gpu, "")} == {"0"}:
        return "nothing without a cache: the kernel is not called"
    return describe(step_gains(name, gpu))


def cache_gain(name: str, gpu: str) -> str:
    return describe(step_gains(name, gpu, "cache all"))


def experts_gain(name: str, gpu: str) -> str:
    """GPU time with checkpointing, and what the memory that is saved without it costs."""
    rows = step_rows(name, gpu, "no checkpointing", GPU_TIME)
    if not rows:
        return ""
    ours, stock = (float(part.split()[0]) for part in rows[0]["notes"]["peak memory"].rstrip(")").split(" (unpatched "))
    less = f"{(stock - ours) / 2:.1f} GiB less memory per layer"
    return f"{cached_experts_gain(name, gpu, '')}; without checkpointing {describe(gains_of(rows))} and {less}"


def cached_experts_gain(name: str, gpu: str, cached: str = CACHED) -> str:
    gains = gains_of(step_rows(name, gpu, f"checkpointing{cached}", GPU_TIME))
    return describe(gains) + " (GPU time)" * bool(gains)


def describe(gains: Sequence[Gain]) -> str:
    """A step's gains in words; what is not clear is said to be so."""
    if gains and not any(gain.clear for gain in gains):
        return f"no clear difference ({span([gain.ratio for gain in gains])})"
    parts = [f"{times(gain.ratio) if gain.clear else 'not clear'} at {gain.tokens:,}" for gain in gains]
    return ", ".join(parts) + " tokens per step" * bool(parts)


def generation_gain(name: str, gpu: str) -> str:
    rows = [row for row in figures(name, gpu) if row["ratio"].get(STOCK) and row["subject"].endswith("compiled")]
    parts = ", ".join(f"{times(row['ratio'][STOCK])} at batch {row['sizes']['batch']}" for row in rows)
    return parts + " (compiled)" * bool(rows)


def rollout_gain(name: str, gpu: str) -> str:
    """Of generation and of the whole step, where it is clear."""
    found = [(row["subject"].partition(",")[0], row, row["ratio"].get(UNPATCHED)) for row in figures(name, gpu)[:2]]
    return ", ".join(f"{what} {times(ratio)}" for what, row, ratio in found if clear(row, ratio) and ratio > 1)


def gains() -> str:
    """A row for each setup that was measured, a column for each GPU."""
    setups = (
        ("training with peft or TRL and bitsandbytes", step_gain, "step-peft-GPU.json"),
        ("the same with `enable(cache=...)`, every weight cached", cache_gain, "step-peft-GPU.json"),
        ("training with Unsloth up to 2026.9", step_gain, "step-unsloth-2026.9.7-GPU.json"),
        ("training with Unsloth from 2026.10 on", step_gain, "step-unsloth-GPU.json"),
        ("the same with `enable(cache=...)`, every weight cached", cache_gain, "step-unsloth-GPU.json"),
        ("training a mixture of experts with peft, experts packed in 4 bits", experts_gain, "step-moe-GPU.json"),
        ("the same with `enable(cache=...)`, every weight cached", cached_experts_gain, "step-moe-GPU.json"),
        ('4-bit generation with `enable(matmul="auto")`', generation_gain, "generate-GPU.json"),
        ('RL with TRL\'s GRPO, the model generating, `enable(matmul="auto")`', rollout_gain, "grpo-GPU.json"),
    )
    found = [[words, *(gain(name, gpu) for gpu in GPUS)] for words, gain, name in setups]
    rows = [row for row in found if any(row[1:])]
    here = [0, *(i for i, _ in enumerate(GPUS, 1) if any(row[i] for row in rows))]
    heading = ("your setup", *(f"what you gain on an {gpu}" for gpu in GPUS))
    return table([heading[i] for i in here], [[row[i] for i in here] for row in rows])


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
        ("step-peft-GPU.json", "peft 1x512", "a QLoRA step of peft, 512 tokens"),
    ):
        found = {gpu: next((r for r in figures(name, gpu) if r["subject"] == subject), None) for gpu in GPUS}
        if row := found[first]:
            ours = f"{digits(row['median'][OURS])} {UNITS.get(row['unit'], row['unit'])}"
            ratios = found[other]["ratio"] if found[other] else {}
            elsewhere = " / ".join(times(ratios[peer]) for peer in (BITSANDBYTES, UNPATCHED, fused) if peer in ratios)
            rows.append((words, ours, cell(row, BITSANDBYTES) or cell(row, UNPATCHED), cell(row, fused), elsewhere))
    libraries = (f"{name} {release('bench-GPU.json', name.lower())}" for name in (BITSANDBYTES, "Unsloth"))
    return table((first, OURS, *libraries, f"on an {other}"), rows)


BLOCKS: dict[str, Callable[[], str]] = {"gains": gains, "gpus": gpus, "results": results}
