"""What is written down is what the code and the data say: generated parts, figures, reasons, names of files, links."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import Bench, bits, offload
from benchmarks.record import Check, Row
from benchmarks.timing import Machine
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools.cli import main
from nf4_patch.tools.timing import Times
from scripts import render_docs

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*render_docs.pages(), ROOT / "CONTRIBUTING.md"]
FILES = [
    file.as_posix()
    for folder in ("benchmarks", "examples", "nf4_patch", "scripts", "tests")
    for file in (ROOT / folder).rglob("*.py")
]
tables = render_docs.tables


def test_generated_parts_are_current(capsys):
    assert render_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_generated_part_and_figure_is_somewhere():
    text = "".join(page.read_text() for page in render_docs.pages())
    for name, block in render_docs.BLOCKS.items():
        # a table may be there before its data
        assert f"<!-- {name}: generated -->" in text or block() == "Not measured yet.", name
    assert {name for name, _ in render_docs.named(text)} == tables.figures().keys()


@pytest.mark.parametrize(
    ("text", "is_true"),
    [
        ("takes 16.16\nms and more.\n\nBelow.", True),
        ("takes 116.16 ms.\n\nBelow: 16.16 ms.", False),
        ("takes 16.16 ms.5", False),
    ],
)
def test_a_figure_of_a_sentence_is_what_the_data_say(text, is_true, monkeypatch):
    monkeypatch.setattr(tables, "figures", lambda: {"step": "16.16 ms"})
    assert [*render_docs.untrue(f"<!-- figures: step -->\n{text}")] == ["step is 16.16 ms"] * (not is_true)


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_no_measured_figure_is_typed_by_hand(page):
    """It belongs to docs/data and a generated part, or has a name in tables.figures()."""
    text = re.sub(r"<!-- ([\w-]+): generated -->.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
    for name, _ in render_docs.named(text):
        text = re.sub(re.escape(tables.figures()[name]).replace(r"\ ", r"\s"), "", text)
    assert not re.findall(r"\d\.\d+ ?[\u00d7x]\B|\d\.\d+ ?(?:ms|\u00b5s|GiB|GB|%)", text)


def test_status_in_the_readme_is_what_it_prints(monkeypatch):
    from nf4_patch.patching.state import State
    from nf4_patch.patching.targets import TARGETS
    from nf4_patch.snapshot import Status, TargetStatus

    for library in ("unsloth", "liger_kernel"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    (shown,) = re.findall(
        r"^```text\n(nf4_patch is on.*?)\n  \.\.\.\n```$", README.read_text(), re.MULTILINE | re.DOTALL
    )
    hits = {name: int(count) for name, count in re.findall(r"^  (\S+): patched, (\d+) hits$", shown, re.MULTILINE)}

    def state_of(target):
        is_imported = target.library in ("bitsandbytes", "transformers", "peft", "torch")
        return (State.INACTIVE if target.option else State.PATCHED) if is_imported else State.WAITING

    targets = tuple(TargetStatus(target.name, state_of(target), hits.pop(target.name, 0)) for target in TARGETS)
    printed = str(Status(enabled=True, targets=targets, shapes={}, errors=()))
    counts = re.sub(
        r"^  \d+ (more.*)$", lambda line: "  ... " + re.sub(r"\b\d+ ", "", line[1]), printed, flags=re.MULTILINE
    )
    assert counts.startswith(shown) and not hits


@pytest.mark.parametrize("file", sorted(tables.DATA.glob("*.json")), ids=lambda file: file.name)
def test_data_file_is_whole_and_named_by_its_command(file):
    patterns = {re.escape(name).replace("GPU", "(h200|h100)") for name in tables.sources()}
    assert any(re.fullmatch(pattern, file.name) for pattern in patterns), "add its command to docs/data/README.md"
    data = json.loads(file.read_text())
    if isinstance(data, dict):
        assert not data.get("failures") and not data.get("exit_code")
        if "machine" in data:
            assert {"gpu", "capability", "releases", "date", "commit"} <= data["machine"].keys()


def recorded(name, folder, monkeypatch, **sections):
    """A benchmark of these sections on an H100, written as the only data file, NAME-h100.json."""
    machine = Machine("NVIDIA H100", "90", "1", "", {"torch": "2.11.0"}, date="2026-11-22", commit="1")
    bench = Bench(machine, sections, dict.fromkeys(sections, ""))
    (folder / f"{name}-h100.json").write_text(json.dumps(bench.as_dict()))
    monkeypatch.setattr(tables, "DATA", folder)
    return bench


def test_what_the_bench_writes_is_what_is_rendered(tmp_path, monkeypatch):
    sides = {"nf4_patch": Times((2.0,)), "bitsandbytes": Times((5.0,)), "ceiling": Times((1.0,))}
    rows = [
        Row(f"64x{64 * factor} bf16", "us", sides, bits({"bitsandbytes": factor == 1}), nbytes=1) for factor in (1, 2)
    ]
    recorded("bench", tmp_path, monkeypatch, dequantize=rows)
    shown = render_docs.BLOCKS["dequantize"]().splitlines()[-2:]
    assert shown[0] == "| 64\u00d764 bf16 | 2.00 | 1.00 (50 %) | 5.00 (2.50\u00d7) |"
    assert shown[1].count("check failed") == 2 and "\u00d7)" not in shown[1]


def test_a_list_of_rows_is_rendered(tmp_path, monkeypatch):
    """step-trl-GPU.json and step-moe-trl-GPU.json: the machine as in every other file, and rows."""
    figures = {"gpu_ms": 15.8, "gpu_spread": 0.1, "wall_ms": 40.0, "launches": 1234, "peak_gib": 5.125}
    rows = [{"side": side, "tokens": 2048, **figures} for side in ("unpatched", "nf4_patch")]
    recorded("step-trl", tmp_path, monkeypatch)
    file = tmp_path / "step-trl-h100.json"
    file.write_text(json.dumps({"machine": json.loads(file.read_text())["machine"], "rows": rows}))
    shown = render_docs.BLOCKS["step-trl"]()
    assert shown.startswith("**H100** ([step-trl-h100.json](data/step-trl-h100.json) of 2026-11-22 with torch 2.11.0):")
    assert shown.splitlines()[-1] == "| nf4_patch | 15.8\u00a0/\u00a040.0 | 1,234 | 5.12 |"
    assert render_docs.BLOCKS["step-moe-trl"]() == "Not measured yet."


def test_every_side_of_a_recipe_has_words():
    """The table leaves out a side without words."""
    from benchmarks.step import COMPARISONS

    sides = {side for name in tables.LAYERS for side in COMPARISONS[name].sides}
    assert sides == tables.SWITCHES.keys()


def test_a_recipe_is_rendered_once_it_was_measured(tmp_path, monkeypatch):
    """Until then the page shows the table of the older file. A row that was not measured is left out."""
    figures = {"tokens": 512, "gpu_ms": 15.8, "wall_ms": 40.04, "launches": 1, "peak_gib": 5.125, "reserved_gib": 6.25}
    recorded("step-moe-trl", tmp_path, monkeypatch)
    machine = json.loads((tmp_path / "step-moe-trl-h100.json").read_text())["machine"]

    def write(name, *sides):
        rows = [{"side": side, **figures} for side in sides]
        (tmp_path / f"{name}-h100.json").write_text(json.dumps({"machine": machine, "rows": rows}))

    write("step-moe-trl", "peft, patch")
    older = render_docs.BLOCKS["recipe-moe"]()
    assert '*The patch* means `enable(experts="4bit")`' in older and older.endswith("| 15.8\u00a0/\u00a040.0 | 5.12 |")
    write("recipe-moe", "unsloth", "patch", "16-bit experts")
    lines = render_docs.BLOCKS["recipe-moe"]().splitlines()
    assert lines[2].startswith("Two layers of Qwen3-30B-A3B, **H100** ([recipe-moe-h100.json]")
    cells = "40.0\u00a0/\u00a015.8 | 6.2 |"
    assert lines[-3:] == [
        f"| a plain TRL script, experts in 16 bits | {cells}",
        f'| `enable(experts="4bit")` | {cells}',
        f"| Unsloth | {cells}",
    ]


def test_a_step_with_offload_is_compared_with_the_resident_one_where_both_alternated(tmp_path, monkeypatch):
    recorded("offload", tmp_path, monkeypatch)
    file = tmp_path / "offload-h100.json"
    assert tables.BLOCKS["offload"]() == "Not measured yet."
    size = {"allocated": 6 * 2**30, "reserved": 7 * 2**30}
    run = {"model": "gpt-oss-20b", "tokens": 2048, "rank": 16, "cap": 14.4, "optimizer": "adamw8bit", "attention_only": False,
           "bus": 50e9, "kernels_ms": 400.0, "in_host": 2**34, "peak": size, "peak_loading": size}  # fmt: skip
    resident = run | {
        "side": "resident",
        "offload": "off",
        "gpu_ms": 1000.0,
        "in_turns": True,
        "fetched": 0.0,
        "in_host": 0,
    }
    turns = run | {"side": "all", "offload": "all", "gpu_ms": 1250.0, "in_turns": True, "fetched": 25e9}
    rows = [
        resident,
        turns,
        turns | {"gpu_ms": 1100.0, "in_turns": False},
        run | {"side": "budget", "failed": "loading"},
    ]
    file.write_text(json.dumps({"machine": json.loads(file.read_text())["machine"], "rows": rows}))
    shown = tables.BLOCKS["offload"]().splitlines()
    assert len(shown) == 2 + 2 + 3
    assert '| `"all"` | 1250 (1.25\u00d7) | 400 | 500 (50) | 1.25\u00d7 | 7.0 / 7.0 | 16.0 |' in shown[-2]
    assert '| `"all"` | 1100 | 400 | 500 (50) | | 7.0 / 7.0 | 16.0 |' in shown[-1]


def test_what_was_trained_with_offload_has_the_bits_of_the_resident_model():
    """Whatever was left on the GPU, and however it was capped."""
    compared = [row for row in tables.records("offload") if row["bits"]]
    resident = {offload.key(row, "cap", "budget"): row for row in compared if row["side"] == "resident"}
    assert len(compared) > len(resident) > 1
    for row in compared:
        other = resident[offload.key(row, "cap", "budget")]
        assert all(row[field] == other[field] for field in ("bits", "losses", "gradients", "adapters"))


@pytest.mark.parametrize(
    ("slower", "fused", "clear"),
    [
        (0, "yes", True), (5, "yes", True), (1, "yes", True), (2, "yes", False),  # four of five rounds, three of five
        (0, "no", False),  # the fused matmul did not run
    ],
)  # fmt: skip
def test_when_a_difference_is_clear(slower, fused, clear):
    stock = tables.STOCK
    sides = {"nf4_patch": Times((9,) * (5 - slower) + (11,) * slower), stock: Times((10,) * 5)}
    row = Row("batch 1", "ms", sides, {stock: Check(True, "")}, notes={"fused": fused}).as_dict()
    row["noise"] = dict.fromkeys(sides, 0.05)
    assert tables.is_clear(row, stock) is clear
    assert tables.side_of(row, stock)["won"].startswith("*") is not clear  # in italics where it is not


def test_one_line_has_the_address_of_the_repository(tmp_path, monkeypatch):
    """Without it the README is as it is here; with it the install line and the links that a package index shows have it."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    absolute = runpy.run_path(str(ROOT / "hatch_build.py"))["absolute"]
    address, text = "https://github.com/someone/nf4_patch", README.read_text()
    assert absolute(text, "") == text
    links = re.findall(r"\]\(([^)]*)\)", absolute(text, address))
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    assert (
        f"![How many times as fast, six cases on an H100]({address}/raw/main/docs/images/at-a-glance.svg)"
        in absolute(text, address)
    )
    assert f"[recipes]({address}/blob/main/docs/recipes.md#x), [a](#b)" in absolute(
        "[recipes](docs/recipes.md#x), [a](#b)", address
    )
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(
        re.sub(r'^repository = ""', f'repository = "{address}"', project, flags=re.MULTILINE)
    )
    monkeypatch.setattr(render_docs, "ROOT", tmp_path)
    shown = render_docs.BLOCKS["install"]()
    assert f"pip install git+{address}\n" in shown
    assert "colab.research.google.com/github/someone/nf4_patch/blob/main/examples/t4_colab.ipynb" in shown


def test_every_data_file_is_written_by_a_command_that_exists():
    assert len(tables.sources()) > 10
    for command in tables.sources().values():
        program, *words = command.split()
        if program == "nf4-patch":
            assert words[0] in main.commands, command
        else:
            assert importlib.util.find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).exists(), command


def test_reasons_that_troubleshooting_explains_exist():
    more = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Reasons")[1].split("<!-- /reasons -->")[1]
    named = {
        name
        for names in re.findall(r"^\* \*\*([A-Z_, ]+)\*\*:", more, flags=re.MULTILINE)
        for name in names.split(", ")
    }
    assert named and named <= Reason.__members__.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_commands_that_a_page_names_exist(page):
    """Links are sphinx's to check."""
    text = page.read_text()
    for name in re.findall(r"`([\w/]+/\w+\.py)`", text):
        assert "toy" in name or any(f"/{file}".endswith(f"/{name}") for file in FILES), name
    for script in re.findall(r"\bscripts/[\w.]+\w", text):
        assert (ROOT / script).exists(), script
    for verb in re.findall(r"nf4-patch ([a-z]+)\b(?! is)", text):
        assert verb in main.commands, verb
    for table, file in re.findall(r"`([A-Z_]+)` (?:in|of) `([\w/]+\.py)`", text):
        assert re.search(rf"^{table}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {table}"


def test_every_example_is_in_the_gallery():
    scripts = {p.name for p in (ROOT / "examples").glob("*.*") if p.suffix in (".py", ".ipynb", ".yaml", ".json")}
    for name in scripts - {"offline.py", "record.py"}:  # what the examples share
        assert f"(../examples/{name})" in (ROOT / "docs" / "examples.md").read_text(), name


def test_site_builds_without_warnings():
    """Every link and every heading that is linked to; each page is in the menu; the docstrings of the API."""
    subprocess.run([ROOT / "scripts" / "docs"], check=True, env={**os.environ, "PYTHON": sys.executable})


def test_the_site_is_never_installed_into_a_python_outside_a_virtual_environment(tmp_path):
    """One without the site's packages; it has no pip either, so that nothing would be installed if this failed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {Path(sys.base_prefix, "bin", "python3")} -I -S "$@"\n')
    python.chmod(0o755)
    for name in (python, tmp_path / "missing"):
        environment = {**os.environ, "PYTHON": str(name)}
        done = subprocess.run([ROOT / "scripts" / "docs"], env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and "virtual environment" in done.stderr and "pip" not in done.stderr, done


def test_every_figure_of_a_gpu_says_what_it_measures():
    release = runpy.run_path(str(ROOT / "scripts" / "release"))
    files = [file.name for file in (ROOT / "docs" / "data").glob("*-h?00.json")]
    assert files and not [name for name in files if not any(map(name.startswith, release["MEASURES"]))]
    for path in {path for paths in release["MEASURES"].values() for path in paths}:
        assert (ROOT / "nf4_patch" / path).exists(), path
