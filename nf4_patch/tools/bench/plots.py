"""Pictures of a bench: dequantization as bars by shape and a roofline by traffic, the fused matmul by rows."""

from __future__ import annotations

from pathlib import Path

from ..output import NothingToWrite
from .peers import BITSANDBYTES, OURS, UNSLOTH_CTYPES, UNSLOTH_TRITON
from .record import CEILING, COPY, Bench, Row, variants_of

COLORS = {
    OURS: "#1b7f4b", UNSLOTH_TRITON: "#d98e04", UNSLOTH_CTYPES: "#b0532b", BITSANDBYTES: "#8b1e3f",
    CEILING: "#444444", COPY: "#bbbbbb",
}  # fmt: skip


def draw(report: Bench, file: Path) -> None:
    """Write a PNG of the bf16 rows of ``report``.

    Raises:
        NothingToWrite: the bits did not agree, or nothing was dequantized.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report.sections.get("dequantize", []) if row.subject.endswith("bf16") and row.checked]
    if not rows or report.failures:
        raise NothingToWrite("nothing to draw: no dequantization was measured with equal bits")
    rows.sort(key=lambda row: row.nbytes)
    figure = Figure(figsize=(13, 10), layout="constrained")
    bars, roofline = figure.subplots(2, 1)
    names = [name for name in COLORS if name in variants_of(rows)]
    draw_bars(bars, rows, [name for name in names if name not in (CEILING, COPY)])
    draw_roofline(roofline, rows, names)
    save(figure, report, file)


def draw_bars(axes, rows: list[Row], names: list[str]) -> None:
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [
            100 * row.times[CEILING].median / row.times[name].median if name in row.times else 0.0 for row in rows
        ]
        axes.bar([x + i * width for x in range(len(rows))], heights, width, label=name, color=COLORS[name])
    axes.axhline(100, color="#444444", linewidth=1)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))])
    axes.set_xticklabels([row.subject.removesuffix(" bf16") for row in rows], rotation=30, ha="right", fontsize=8)
    title = "Dequantize to bf16: GPU time, as a share of the same bytes moved without a decode"
    axes.set(ylabel="% of the traffic ceiling", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def draw_roofline(axes, rows: list[Row], names: list[str]) -> None:
    for name in names:
        points = [(row.nbytes / 1e6, row.nbytes / row.times[name].median / 1e3) for row in rows if name in row.times]
        style = "--" if name in (CEILING, COPY) else "o-"
        axes.plot(*zip(*points, strict=True), style, label=name, color=COLORS[name], markersize=4)
    axes.set(xscale="log", xlabel="bytes moved a call, MB", ylabel="GB/s", ylim=(0, None))
    axes.set_title("Roofline: bytes over GPU time")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def draw_matmul(report: Bench, file: Path) -> None:
    """Write a PNG: how many times ours is as fast as bitsandbytes and as a dense weight, by rows of X, a line a weight.

    Raises:
        NothingToWrite: a result was less accurate than dequantize + matmul, or nothing was measured.
    """
    from matplotlib.figure import Figure

    if not report.sections or report.failures:
        raise NothingToWrite("nothing to draw: nothing was measured with the accuracy of dequantize + matmul")
    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, peer in zip(figure.subplots(1, 2, sharey=True), (BITSANDBYTES, "dense"), strict=True):
        for weight, rows in report.sections.items():
            points = [(row.sizes["m"], row.ratio(peer)) for row in rows]
            axes.plot(*zip(*points, strict=True), "o-", label=weight, markersize=4)
        axes.axhline(1, color="#444444", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="rows of X", title=f"times as fast as {peer}")
    axes.legend(fontsize=8)
    save(figure, report, file)


def save(figure, report: Bench, file: Path) -> None:
    """With the machine as its title."""
    figure.suptitle(str(report.machine), fontsize=8)
    figure.savefig(file, format="png", dpi=130)
