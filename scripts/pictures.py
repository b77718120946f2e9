"""The pictures of README and docs, from docs/data/*.json. scripts/render_docs.py writes them to docs/images.

Each function returns what its picture shows, and a function that draws it into a figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import BITSANDBYTES, DENSE, GPU_TIME, GPUS, OURS, PEFT, STOCK, UNPATCHED, records, shape
from tables import CACHE, CACHED

GREEN, GRAY, AMBER = "#1b7f4b", "#9a9a9a", "#d98e04"
STEP = {"side": UNPATCHED, "clock": GPU_TIME, "setting": "patch"}
GLANCE = {  # what a user does -> (data file, its row, color)
    "step with peft, 512 tokens": ("step-peft", STEP | {"size": 512}, GREEN),
    "step with peft, 4,096 tokens": ("step-peft", STEP | {"size": 4096}, GREEN),
    "step with peft, everything cached, 512 tokens": ("step-peft", STEP | CACHED | {"size": 512}, AMBER),
    "step with Unsloth 2026.10, everything cached, 2,048 tokens": ("step-unsloth", STEP | CACHED | {"size": 2048}, AMBER),
    "LoRA on a mixture's experts, 512 tokens": ("step-experts-4bit", {"side": PEFT, "size": 512}, AMBER),
    'generation, batch 8, matmul="auto"': ("generate", {"side": STOCK, "subject": "batch 8, compiled"}, AMBER),
}  # fmt: skip


def axes_of(figure: Any, width: float, height: float, columns: int = 1) -> Any:
    figure.set_size_inches(width, height)
    for axes in (found := figure.subplots(1, columns, squeeze=False)[0]):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return found


def at_a_glance() -> tuple[Any, Callable[[Any], None]]:
    """What the README shows: things that a user does, and how many times as fast each is."""
    bars = [
        (label, record["ratio"], color if record["clear"] else GRAY)
        for label, (file, where, color) in GLANCE.items()
        for record in records(file, gpu=GPUS[0], **where)
    ]

    def draw(figure: Any) -> None:
        (axes,) = axes_of(figure, 9, 2.6)
        for i, (label, ratio, color) in enumerate(bars):
            axes.barh(label, ratio, color=color)
            axes.text(max(ratio, 1) + 0.03, i, f"{ratio:.2f}×", va="center", fontsize=8)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.invert_yaxis()
        axes.margins(x=0.08, y=0.01)
        figure.supxlabel(
            f"times as fast as without the patch; amber: with an option; gray: no clear difference. {GPUS[0]}; steps: GPU time;\n"
            "generation: tokens a second; random weights: four layers of Llama-3.1-8B (generation: eight), two of Qwen3-30B-A3B",
            fontsize=8,
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
