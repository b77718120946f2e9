#!/usr/bin/env python
"""The generated parts of README and docs: tables of the code, and figures from docs/data/*.json.

    python scripts/render_docs.py            write what is behind
    python scripts/render_docs.py --check    name what is behind and exit 1

A generated part stands between ``<!-- NAME: generated -->`` and ``<!-- /NAME -->``; NAME is a key of BLOCKS. A picture is
a key of pictures.PICTURES and carries the digest of its data. docs/data/README.md says which command writes which data file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import figures
import glance
import pictures
from figures import table

IMAGES, PACKAGE = ROOT / "docs" / "images", ROOT / "nf4_patch"


# --- the code's tables ---


def targets() -> str:
    from nf4_patch.patching.targets import TARGETS

    groups: dict[tuple[str, str], list[str]] = {}
    for t in TARGETS:
        row = (f"{t.library} {t.releases}", ", ".join(t.tested))
        groups.setdefault(row, []).append(f"`{t.name.removeprefix(f'{t.library}.')}`: {t.covers}")
    rows = [(library, "<br>".join(found), tested) for (library, tested), found in groups.items()]
    return table(("library", "what is replaced: which covers", "tested with"), rows)


def reasons() -> str:
    from nf4_patch.patching.reasons import Reason

    rows = [(f"`{r.name}`", r.sentence, r.advice, "yes" * r.is_expected) for r in Reason]
    return table(("reason", "meaning", "what to do", "expected"), rows)


def variables() -> str:
    from nf4_patch.config import VARIABLES

    rows = [
        (f"`{v.name}`", ", ".join(v.values), f"`{v.default}`" if v.default else "unset", v.meaning) for v in VARIABLES
    ]
    return table(("variable", "values", "default", "meaning"), rows)


def verbs() -> str:
    from nf4_patch.tools.cli import main, summary

    return table(("command", ""), [(f"`nf4-patch {name}`", summary(verb)) for name, verb in main.commands.items()])


# --- the imports ---


def imports() -> str:
    """The package by floor and folder: its modules, and the folders that they import from. No ring, or this raises."""
    edges = {module_of(file): imported_by(file) for file in sorted(PACKAGE.rglob("*.py"))}
    edges = {module: {name for name in found if name in edges and name != module} for module, found in edges.items()}
    tuple(TopologicalSorter(edges).static_order())
    folders: dict[str, list[str]] = {}
    for module in edges:
        folders.setdefault(parent(module), []).append(module)
    rows = []
    for floor in ("tools", "patching", "nf4"):
        for folder in sorted(name for name in folders if f"{name}.".startswith(f"nf4_patch.{floor}.")):
            names = " ".join(sorted(set(map(last, folders[folder])) - {"__init__"}))
            below = {parent(other) for module in folders[folder] for other in edges[module]} - {folder, "nf4_patch"}
            rows.append((short(folder), names, ", ".join(sorted(map(short, below)))))
    return table(("folder", "modules", "imports from"), rows)


def parent(module: str) -> str:
    return module.rpartition(".")[0]


def last(module: str) -> str:
    return module.rpartition(".")[2]


def short(folder: str) -> str:
    return folder.removeprefix("nf4_patch.").replace(".", "/")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imported_by(file: Path) -> set[str]:
    """Modules that are imported when ``file`` is, or in one of its functions; not those for types only."""
    package = file.relative_to(ROOT).parent.parts
    names = set()
    tree = ast.parse(file.read_text())
    typing = {id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
              for n in ast.walk(node)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing:
            base = ".".join(
                [*(package[: len(package) - node.level + 1] if node.level else ()), node.module or ""]
            ).strip(".")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


BLOCKS: dict[str, Callable[[], str]] = {
    **glance.BLOCKS,
    **figures.BLOCKS,
    "targets": targets,
    "reasons": reasons,
    "variables": variables,
    "commands": verbs,
    "imports": imports,
}


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


def digest(values: Any, make: Callable[[], Any]) -> str:
    """Of what a picture shows and of the code that draws it."""
    return hashlib.sha256((json.dumps(values) + inspect.getsource(make)).encode()).hexdigest()


def save(file: Path, draw: Callable[[Any], None], source: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = file.name  # or its ids are random
    figure = Figure(layout="constrained")
    draw(figure)
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, metadata={"Date": None, "Source": source})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, name what is behind")
    check = parser.parse_args(arguments).check
    behind = []
    for page in pages():
        text = page.read_text()
        wanted = rendered(text, page.name)
        if text != wanted:
            behind.append(page)
            if not check:
                page.write_text(wanted)
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
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
