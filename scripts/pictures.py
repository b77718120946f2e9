"""The picture of the README, from docs/data/*.json. scripts/render_docs.py writes it to docs/images.

A function returns what its picture shows, and a function that draws it into a figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import GPU_TIME, GPUS
from tables import GENERATION, LORA_ON_EXPERTS, SAME_BITS, SAME_BITS_CACHED, UNSLOTHS_SPEED, Setup

GREEN, GRAY, AMBER = "#1b7f4b", "#9a9a9a", "#d98e04"
GLANCE: list[tuple[str, Setup, dict[str, Any], str]] = [  # what a user does, its records, which of them, color
    ("LoRA on experts, 512 tokens", LORA_ON_EXPERTS, {"size": 512, "clock": GPU_TIME}, AMBER),
    ("TRL, Liger, LoRA in one function, 2,048 tokens", UNSLOTHS_SPEED, {"size": 2048, "clock": GPU_TIME}, AMBER),
    ("generation, batch 8", GENERATION, {"what": "batch 8"}, AMBER),
    ("step with peft, everything cached, 512 tokens", SAME_BITS_CACHED, {"size": 512, "clock": GPU_TIME}, AMBER),
    ("step with peft, 512 tokens", SAME_BITS, {"size": 512, "clock": GPU_TIME}, GREEN),
    ("step with peft, 4,096 tokens", SAME_BITS, {"size": 4096, "clock": GPU_TIME}, GREEN),
]


def at_a_glance() -> tuple[Any, Callable[[Any], None]]:
    """What the README shows: things that a user does, and how many times as fast each is."""
    bars = [
        (f"{label} (1: {setup.against})", record["ratio"], color if record["clear"] else GRAY)
        for label, setup, where, color in GLANCE
        for record in setup.records(gpu=GPUS[0], **where)
    ]

    def draw(figure: Any) -> None:
        figure.set_size_inches(5, 4)  # every word legible in 400 pixels
        axes = figure.subplots()
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        for i, (label, ratio, color) in enumerate(bars):
            axes.barh(i, ratio, 0.42, color=color)
            axes.text(0, i - 0.3, label, va="bottom", fontsize=9.5, bbox={"color": "white", "pad": 1})
            axes.text(max(ratio, 1) + 0.03, i, f"{ratio:.2f}×", va="center", fontsize=10)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.margins(x=0.15, y=0.02)
        figure.supxlabel(
            f"times as fast on an {GPUS[0]}: GPU time; generation by the clock\n"
            "green: the same bits by default; amber: with an option",
            fontsize=9,
        )

    return bars, draw


PICTURES = {"at-a-glance.svg": at_a_glance}
