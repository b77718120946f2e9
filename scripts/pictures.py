"""The pictures of README and docs, from docs/data/*.json. scripts/render_docs.py writes them to docs/images.

Each function returns what its picture shows, and a function that draws it into a figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import BITSANDBYTES, DENSE, GPU_TIME, GPUS, OURS, UNPATCHED, records, shape
from tables import CACHE, GENERATION, LORA_ON_EXPERTS, SAME_BITS, SAME_BITS_CACHED, UNSLOTHS_SPEED, Setup

GREEN, GRAY, AMBER = "#1b7f4b", "#9a9a9a", "#d98e04"
GLANCE: list[tuple[str, Setup, dict[str, Any], str]] = [  # what a user does, its records, which of them, color
    ("LoRA on experts, 512 tokens", LORA_ON_EXPERTS, {"size": 512}, AMBER),
    ("TRL, Liger, LoRA in one function, 2,048 tokens", UNSLOTHS_SPEED, {"size": 2048, "clock": GPU_TIME}, AMBER),
    ("generation, batch 8", GENERATION, {"what": "batch 8"}, AMBER),
    ("step with peft, everything cached, 512 tokens", SAME_BITS_CACHED, {"size": 512, "clock": GPU_TIME}, AMBER),
    ("step with peft, 512 tokens", SAME_BITS, {"size": 512, "clock": GPU_TIME}, GREEN),
    ("step with peft, 4,096 tokens", SAME_BITS, {"size": 4096, "clock": GPU_TIME}, GREEN),
]


def axes_of(figure: Any, width: float, height: float, columns: int = 1) -> Any:
    figure.set_size_inches(width, height)
    for axes in (found := figure.subplots(1, columns, squeeze=False)[0]):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return found


def at_a_glance() -> tuple[Any, Callable[[Any], None]]:
    """What the README shows: things that a user does, and how many times as fast each is."""
    bars = [
        (f"{label} (1: {setup.against})", record["ratio"], color if record["clear"] else GRAY)
        for label, setup, where, color in GLANCE
        for record in setup.records(gpu=GPUS[0], **where)
    ]

    def draw(figure: Any) -> None:
        (axes,) = axes_of(figure, 5, 4)  # every word legible in 400 pixels
        for i, (label, ratio, color) in enumerate(bars):
            axes.barh(i, ratio, 0.42, color=color)
            axes.text(0, i - 0.3, label, va="bottom", fontsize=9.5, bbox={"color": "white", "pad": 1})
            axes.text(max(ratio, 1) + 0.03, i, f"{ratio:.2f}×", va="center", fontsize=10)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.margins(x=0.15, y=0.02)
        figure.supxlabel(
            f"times as fast, {GPUS[0]}; green: the same bits by default; amber: with an option", fontsize=9
        )

    return bars, draw


def ceiling() -> tuple[Any, Callable[[Any], None]]:
    """Dequantization as a part of the speed of a kernel that moves the same bytes."""
    rows = [row for row in records("bench", gpu=GPUS[0], side="ceiling") if row["subject"].endswith("bf16")]
    rows.sort(key=lambda row: row["nbytes"])
    colors = {OURS: GREEN, "Unsloth Triton": AMBER, BITSANDBYTES: GRAY}
    values = {n: [100 * r["median"]["ceiling"] / r["median"].get(n, float("inf")) for r in rows] for n in colors}

    def draw(figure: Any) -> None:
        (axes,) = axes_of(figure, 9, 3.6)
        for i, (name, heights) in enumerate(values.items()):
            axes.bar([x + 0.28 * i for x in range(len(rows))], heights, 0.28, label=name, color=colors[name])
        axes.axhline(100, color="#444444", linewidth=1)
        labels = [shape(row["subject"].removesuffix(" bf16")) for row in rows]
        axes.set_xticks([x + 0.28 for x in range(len(rows))], labels, rotation=35, ha="right", fontsize=8)
        axes.set_ylabel(f"% of the traffic ceiling, {GPUS[0]}", fontsize=8)
        axes.legend(fontsize=8, ncols=3, loc="upper left", bbox_to_anchor=(0, 1.15), frameon=False)

    return values, draw


def memory() -> tuple[Any, Callable[[Any], None]]:
    """GPU time of a step over what the cache holds, a part a model."""
    models: dict[str, dict[str, Any]] = {}
    for row in records("step-cache", gpu=GPUS[0], side=OURS, size=512, **CACHE):
        model = models.setdefault(row["who"], {"points": []} | {n: row["median"][n] for n in (UNPATCHED, DENSE)})
        model["points"].append((float(row["notes"].get("cache", "0").split()[0]), row["median"][OURS]))

    def draw(figure: Any) -> None:
        for axes, (who, model) in zip(axes_of(figure, 9, 3, max(1, len(models))), models.items(), strict=False):
            sizes, times = zip(*model["points"], strict=True)
            axes.plot(sizes, times, marker="o", color=GREEN, label="with the patch, by cache")
            axes.plot(0, model[UNPATCHED], marker="s", color=GRAY, linestyle="none", label="without the patch")
            axes.axhline(model[DENSE], color="#444444", linewidth=1, linestyle="--", label="16-bit weights")
            axes.set_title(f"{who}, 512 tokens", fontsize=9)
            axes.set_xlabel("GiB of cached weights", fontsize=8)
            axes.set_ylim(0, 1.08 * max(model[UNPATCHED], *times))  # from 0, or 15 % look like a collapse
        figure.axes[0].set_ylabel(f"GPU time of a step, ms ({GPUS[0]})", fontsize=8)
        figure.axes[0].legend(fontsize=7, frameon=False, loc="lower right")

    return models, draw


PICTURES = {"at-a-glance.svg": at_a_glance, "dequantize.svg": ceiling, "weight-cache.svg": memory}
