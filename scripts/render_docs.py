#!/usr/bin/env python
"""The generated parts of README and docs: tables of the code, and figures from docs/data/*.json.

    python scripts/render_docs.py            write what is behind
    python scripts/render_docs.py --check    name what is behind and exit 1

A generated part stands between ``<!-- NAME: generated -->`` and ``<!-- /NAME -->``; NAME is a key of BLOCKS. A picture is
a key of pictures.PICTURES and carries the digest of its data. Figures that are written by hand have an anchor before their
paragraph, ``<!-- figures: 13 of 80 GB = 12.9, 80; NAME = 2**30 -->``: a part of the text and the values of its numbers, or a
name for what follows. The functions of figures.py say what is in the data files.
docs/data/README.md says which command writes which data file.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
import figures
import pictures
import tables
import test_imports
from figures import Record
from tables import Column, Table

from nf4_patch.patching.config import VARIABLES
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools import cli

IMAGES = ROOT / "docs" / "images"


# --- the code's tables ---


def folder(module: str) -> str:
    return "/".join(module.split(".")[1:-1])


def imports() -> list[Record]:
    """The package by floor and folder: its modules, and the folders that they import from."""
    modules = test_imports.graph()
    packages = {module.rpartition(".")[0] for module in modules}
    found = [
        {"folder": folder(name), "name": name.rpartition(".")[2], "below": {*map(folder, modules[name] - packages)}}
        for name in modules.keys() - packages if folder(name)
    ]  # fmt: skip
    floors = test_imports.FLOORS
    return sorted(found, key=lambda each: (-floors[each["folder"].split("/")[0]], each["folder"], each["name"]))


def below(found: list[Record]) -> str:
    return ", ".join(sorted(set().union(*(record["below"] for record in found)) - {found[0]["folder"], ""}))


BLOCKS: dict[str, Callable[[], str]] = {
    **tables.BLOCKS,
    "targets": Table(lambda: [{"t": t, "name": t.name.removeprefix(f"{t.library}."), "tested": ", ".join(t.tested)} for t in TARGETS], (
        Column("library", "{t.library} {t.releases}"), Column("what is replaced: which covers", "`{name}`: {t.covers}", {}, "<br>"),
        Column("tested with", "{tested}"))),
    "reasons": Table(lambda: [{"r": reason, "expected": "yes" * reason.is_expected} for reason in Reason], (
        Column("reason", "`{r.name}`"), Column("meaning", "{r.sentence}"), Column("what to do", "{r.advice}"),
        Column("expected", "{expected}"))),
    "variables": Table(
        lambda: [{"v": v, "values": ", ".join(v.values), "default": f"`{v.default}`" if v.default else "unset"} for v in VARIABLES], (
        Column("variable", "`{v.name}`"), Column("values", "{values}"), Column("default", "{default}"),
        Column("meaning", "{v.meaning}"))),
    "commands": Table(lambda: [{"name": name, "summary": verb.get_short_help_str(200)} for name, verb in cli.main.commands.items()], (
        Column("command", "`nf4-patch {name}`"), Column("", "{summary}"))),
    "imports": Table(imports, (
        Column("folder", "{folder}"), Column("modules", "{name}", {}, " "), Column("imports from", below, {}))),
}  # fmt: skip


# --- writing and checking ---


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, page: str) -> str:
    """``text`` with every generated part as it should be.

    Raises:
        SystemExit: a part has no end or no function in BLOCKS.
    """

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise SystemExit(f"{page}: {name!r} is in no row of BLOCKS; known: {', '.join(BLOCKS)}")
        return f"<!-- {name}: generated -->\n{BLOCKS[name]()}\n<!-- /{name} -->"

    return re.sub(r"<!-- ([\w-]+): generated -->\n.*?<!-- /\1 -->", part, text, flags=re.DOTALL)


ANCHOR = re.compile(r"<!-- figures: (.*?) -->\n(.*?)(?=\n\n|\Z)", re.DOTALL)


def untrue(text: str) -> Iterator[str]:
    """Of figures that are written by hand: what the data say otherwise, and what is not in the paragraph of its anchor."""
    for anchors, paragraph in ANCHOR.findall(text):
        known = {**vars(figures), "memory": tables.memory}
        for written, formula in (re.split(r" = ", each, maxsplit=1) for each in re.split(r";\s+", anchors)):
            value = eval(f"({formula})", known)
            if written.isidentifier():
                known[written] = value
                continue
            numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", written)
            values = value if isinstance(value, tuple) else (value,)
            now = [*map(like, numbers, values), *map(str, values[len(numbers) :])]
            if now != numbers:
                yield f"{written} is {', '.join(now)} by {formula}"
            if not re.search(rf"(?<![\d.,]){re.escape(written)}(?!\d|[.,]\d)", " ".join(paragraph.split())):
                yield f"{written} has an anchor and is not in its paragraph"


def like(number: str, value: float) -> str:
    """With as many decimals, and a comma between thousands where there is one."""
    return f"{value:{',' * (',' in number)}.{len(number.partition('.')[2])}f}"


def digest(values: Any, make: Callable[[], Any]) -> str:
    """Of what a picture shows and of the code that draws it."""
    return hashlib.sha256((json.dumps(values) + inspect.getsource(make)).encode()).hexdigest()


def save(file: Path, draw: Callable[[Any], None], source: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = file.name  # or its ids are random
    figure = Figure(layout="constrained")
    draw(figure)
    figure.savefig(file, metadata={"Date": None, "Source": source})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, name what is behind")
    check = parser.parse_args(arguments).check
    behind, wrong = [], 0
    for page in pages():
        text = page.read_text()
        wanted = rendered(text, page.name)
        if text != wanted:
            behind.append(page)
            if not check:
                page.write_text(wanted)
        for found in untrue(wanted):
            print(f"to write by hand: {page.relative_to(ROOT)}: {found}")
            wrong += 1
    for name, make in pictures.PICTURES.items():
        file = IMAGES / name
        values, draw = make()
        source = digest(values, make)
        if not file.exists() or source not in file.read_text():
            behind.append(file)
            if not check:
                save(file, draw, source)
    for path in behind:
        print("behind:" if check else "written:", path.relative_to(ROOT))
    if check and behind:
        print("run: python scripts/render_docs.py")
    return int(bool(wrong) or (check and bool(behind)))


if __name__ == "__main__":
    sys.exit(main())
