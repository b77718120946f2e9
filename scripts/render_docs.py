#!/usr/bin/env python
"""Render the generated parts of README and docs: tables from the code, and tables, figures and a picture from docs/data/*.json.

    python scripts/render_docs.py            rewrite outdated parts
    python scripts/render_docs.py --check    list outdated parts and exit 1

A generated part is between ``<!-- NAME: generated -->`` and ``<!-- /NAME -->``, where NAME is a key of BLOCKS. A paragraph with
figures follows ``<!-- figures: NAME, NAME -->``, and tables.figures() returns the text of each figure. docs/data/README.md lists
the command that writes each data file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import tables
from tables import GPU_TIME, GPUS, Column, Record, pivot

from nf4_patch.patching.config import VARIABLES
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools import cli, doctor

PICTURE = ROOT / "docs" / "images" / "at-a-glance.svg"

# --- tables from the code ---


def install() -> str:
    """Return the installation command. If pyproject.toml has the repository's address, add a badge that opens the notebook."""
    repository = re.findall(r'^repository = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    if not repository:
        return "```bash\npip install .    # in a clone, because nf4_patch is not on PyPI\n```"
    notebook = repository.replace("https://github.com", "https://colab.research.google.com/github")
    badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    return f"```bash\npip install git+{repository}\n```\n\n{badge}({notebook}/blob/main/examples/t4_colab.ipynb)"


def sample_of_doctor() -> str:
    """Return the first lines of ``nf4-patch doctor`` for the GPU and the releases of step-trl's data, without Unsloth."""
    machine = tables.records("step-trl")[0]["machine"]
    releases = {name: release for name, release in machine["releases"].items() if not name.startswith("unsloth")}
    capability = (int(machine["capability"][:-1]), int(machine["capability"][-1]))
    gpu = doctor.Gpu(0, machine["gpu"], capability, 80.0)
    lines = doctor.lines_to_type(releases, False, [capability])
    text = "\n".join(doctor.DoctorReport("", releases, [gpu], "", [], [], [], lines).render())
    return f"```text\n{text.partition('GPU 0')[0].strip()}\n...\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    **tables.BLOCKS,
    "doctor": sample_of_doctor,
    "install": install,
    "targets": lambda: pivot(
        ({"t": t, "name": t.name.removeprefix(f"{t.library}."), "tested": ", ".join(t.tested)} for t in TARGETS),
        Column("library", "{t.library} {t.releases}"), Column("replaced function: what it covers", "`{name}`: {t.covers}", {}, "<br>"),
        Column("tested with", "{tested}")),
    "reasons": lambda: pivot(
        ({"r": reason, "expected": "yes" * reason.is_expected} for reason in Reason), Column("reason", "`{r.name}`"),
        Column("meaning", "{r.sentence}"), Column("what to do", "{r.advice}"), Column("expected", "{expected}")),
    "variables": lambda: pivot(
        ({"v": v, "values": ", ".join(v.values), "default": f"`{v.default}`" if v.default else "unset"} for v in VARIABLES),
        Column("variable", "`{v.name}`"), Column("values", "{values}"), Column("default", "{default}"), Column("meaning", "{v.meaning}")),
    "commands": lambda: pivot(
        ({"name": name, "summary": verb.get_short_help_str(200)} for name, verb in cli.main.commands.items()),
        Column("command", "`nf4-patch {name}`"), Column("", "{summary}")),
}  # fmt: skip

# --- the picture of the README ---

GREEN, GRAY, AMBER = "#1b7f4b", "#9a9a9a", "#d98e04"
BARS = (  # label, key of tables.GAINS, number of tokens or sequences, color
    ("LoRA on experts, Liger, 512 tokens", tables.EXPERTS, 512, AMBER),
    ("the same, 4,096 tokens", tables.SAME, 4096, AMBER),
    ("TRL, Liger, LoRA in one function, 2,048 tokens", tables.DENSE_TRL, 2048, AMBER),
    ("generation, batch 8", "4-bit generation, compiled", 8, AMBER),
    ("step with peft, 512 tokens", tables.PLAIN, 512, GREEN),
    ("step with peft, 4,096 tokens", tables.PLAIN, 4096, GREEN),
)


def bars() -> list[tuple[str, float, str]]:
    """Return label, ratio and color of each bar. The ratio of a step is of GPU time."""
    shown: dict[Any, Record] = {}
    for record in tables.gains():
        if record["gpu"] == GPUS[0] and (record["by"] == GPU_TIME or "tokens" not in record["of"]):
            shown[record["trained"], record["size"]] = record
    found = [(label, shown[trained, size], color) for label, trained, size, color in BARS]
    return [
        (f"{label} (1: {each['against']})", each["ratio"], color if each["clear"] else GRAY)
        for label, each, color in found
    ]


CAPTION = (
    f"speed-up on an {GPUS[0]}: GPU time; generation: wall-clock time\n"
    "green: bit-identical, by default; amber: with an option"
)


def draw(found: list[tuple[str, float, str]], source: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = PICTURE.name  # otherwise its ids are random
    figure = Figure((5, 4), layout="constrained")  # legible at a width of 400 pixels
    axes = figure.subplots()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    for i, (label, ratio, color) in enumerate(found):
        axes.barh(i, ratio, 0.42, color=color)
        axes.text(0, i - 0.3, label, va="bottom", fontsize=9.5, bbox={"color": "white", "pad": 1})
        axes.text(max(ratio, 1) + 0.03, i, f"{ratio:.2f}×", va="center", fontsize=10)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.margins(x=0.15, y=0.02)
    figure.supxlabel(CAPTION, fontsize=9)
    figure.savefig(PICTURE, metadata={"Date": None, "Source": source})


# --- writing and checking ---


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str) -> str:
    """Return a page with all generated parts up to date."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]}: generated -->\n{BLOCKS[match[1]]()}\n<!-- /{match[1]} -->"

    return re.sub(r"<!-- ([\w-]+): generated -->\n.*?<!-- /\1 -->", part, text, flags=re.DOTALL)


def named(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each figure of a page, and its paragraph."""
    for names, paragraph in re.findall(r"<!-- figures: (.*?) -->\n(.*?)(?=\n\n|\Z)", text, re.DOTALL):
        yield from ((name, " ".join(paragraph.split())) for name in names.split(", "))


def untrue(text: str) -> Iterator[str]:
    """Yield the figures whose text differs from the data."""
    for name, paragraph in named(text):
        figure = tables.figures()[name]
        if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", paragraph):
            yield f"{name} is {figure}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, list outdated parts")
    check = parser.parse_args(arguments).check
    behind, wrong = [], 0
    for page in pages():
        text = page.read_text()
        wanted = rendered(text)
        if text != wanted:
            behind.append(page)
            if not check:
                page.write_text(wanted)
        for found in untrue(wanted):
            print(f"edit by hand: {page.relative_to(ROOT)}: {found}")
            wrong += 1
    source = hashlib.sha256(json.dumps([CAPTION, bars()]).encode()).hexdigest()
    if not PICTURE.exists() or source not in PICTURE.read_text():
        behind.append(PICTURE)
        if not check:
            draw(bars(), source)
    for path in behind:
        print("outdated:" if check else "written:", path.relative_to(ROOT))
    return int(bool(wrong) or (check and bool(behind)))


if __name__ == "__main__":
    sys.exit(main())
