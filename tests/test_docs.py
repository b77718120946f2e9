"""What is written down is what the code and the data say: generated parts, reasons, links, commands, docstrings."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

import nf4_patch
from benchmarks import Bench, bits
from benchmarks.record import Check, Row
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools.bench.timing import Machine, Times
from nf4_patch.tools.cli import main
from scripts import render_docs

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
USER_PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]  # without docs/notes
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def written(page: Path) -> str:
    """What a person wrote: without the generated parts, and without what an anchor holds against the data."""
    text = re.sub(r"<!-- ([\w-]+): generated -->.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
    for anchors, paragraph in render_docs.ANCHOR.findall(text):
        held = [part.split(" = ")[0] for part in re.split(r";\s+", anchors)]
        held = [part for part in held if not part.isidentifier()]
        text = text.replace(paragraph, re.sub("|".join(map(re.escape, held)), "", " ".join(paragraph.split())))
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def test_generated_parts_are_current(capsys):
    assert render_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_generated_part_is_somewhere():
    text = "".join(page.read_text() for page in render_docs.pages())
    for name in render_docs.BLOCKS:
        if render_docs.BLOCKS[name]() == "Not measured yet.":
            continue  # a table that is there before its data
        assert f"<!-- {name}: generated -->" in text and f"<!-- /{name} -->" in text, name


def test_no_line_of_readme_and_docs_is_wide():
    for page in render_docs.pages():
        prose = re.sub(r"<!-- ([\w-]+): generated -->.*?<!-- /\1 -->|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        wide = [line for line in prose.splitlines() if len(line) > 130 and not line.startswith("|")]
        assert not wide or page.parent.name == "data", f"{page.name}: {wide}"


@pytest.mark.parametrize(
    ("anchor", "text", "problem"),
    [
        ("16.16 ms = step['median']['nf4_patch']", "takes 16.16 ms", ""),
        (
            "16.1 ms (1.10\u00d7) = step['median']['nf4_patch'], step['ratio']['unpatched']",
            "takes 16.1\nms (1.10\u00d7)",
            "is 16.2, 1.10 by",
        ),
        ("1,616 = 1616", "takes 1616", "is not in its paragraph"),
        ("16.16 = 16.16", "takes 116.16, 16.161", "is not in its paragraph"),
        ("16.16 = 16.16, 5", "takes 16.16", "16.16 is 16.16"),  # a value too many
    ],
)
def test_a_figure_by_hand_is_held_against_the_data(anchor, text, problem):
    data = {"median": {"nf4_patch": 16.16}, "ratio": {"unpatched": 1.1}}
    found = [*render_docs.untrue(f"<!-- figures: step = {data};\n{anchor} -->\n{text}, and more.\n\n16.16 below")]
    assert len(found) == bool(problem) and problem in "".join(found)


def read(page: Path) -> str:
    """What a reader sees: no comments, and of a link its words."""
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"<!--.*?-->\n?", "", page.read_text(), flags=re.DOTALL))


def first_screen() -> str:
    return "\n".join(read(README).splitlines()[:40])


def test_first_screen():
    """A sentence and a figure, how to install, how to switch on, what one gains, and the picture, in 40 lines."""
    screen = " ".join(first_screen().split())
    wanted = (
        "ms of GPU time instead",
        "pip install",
        "nf4_patch.enable()",
        "| what you train |",
        "Generating",
        "six cases",
    )
    assert [part for part in wanted if part not in screen] == []
    assert [*wanted] == sorted(wanted, key=screen.index)


@pytest.mark.parametrize(("page", "most"), [("README.md", 700), ("docs/mixtures-of-experts.md", 1000)])
def test_length(page, most):
    """A README of two minutes: everything that is read is counted, tables and code too."""
    words = [word for word in read(ROOT / page).split() if re.search(r"\w", word)]
    assert len(words) <= most


def measured() -> set[str]:
    """Ratios of what the README shows, by either clock; in italics where they are not more than the noise of their run."""
    records = (record for setup in render_docs.tables.SETUPS for record in setup.records())
    return {f"{record['ratio']:.2f}" if record["clear"] else f"*{record['ratio']:.2f}*" for record in records}


def test_every_number_of_the_first_screen_is_measured():
    """A ratio is in a data file, clear or in italics; what a sentence says has an anchor. Else there are bits, GB of a GPU, tokens
    of a step, and the releases that the package needs."""
    ratios = re.findall(r"\*?\d\.\d\d\*?(?= / |\u00d7)", first_screen())
    assert len(ratios) > 20 and set(ratios) <= measured()
    head = written(README).split("## Use")[0]
    head = re.sub(r"\]\([^)]*\)|`[^`]*`|\b[A-Za-z]+[\w.-]*\d[\w.-]*", "", head)  # links, code, names with digits
    needed = re.findall(r">=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert {*re.findall(r"\d[\d.,]*\d|\d", head)} <= {"4", "16", "24", "48", "4,096", *needed}


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_no_figure_and_no_commit_is_typed_by_hand(page):
    figure = r"\d\.\d+ ?[\u00d7x]\B|\d\.\d+ ?(?:ms|\u00b5s|GiB|GB|%)"
    assert not re.findall(figure, written(page)), "a figure belongs to docs/data and a generated part, or has an anchor"
    assert not re.findall(r"\b[0-9a-f]{7}\b", page.read_text()), "a commit belongs to docs/data"


def test_status_in_the_readme_is_what_it_prints(monkeypatch):
    from nf4_patch.patching.state import State
    from nf4_patch.patching.targets import TARGETS
    from nf4_patch.snapshot import Status, TargetStatus

    for library in ("unsloth", "liger_kernel"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    shown = README.read_text().split("```text\n")[1].split("\n```")[0]
    hits = {name: int(count) for name, count in re.findall(r"^  (\S+): patched, (\d+) hits$", shown, re.MULTILINE)}

    def state_of(target):
        is_imported = target.library in ("bitsandbytes", "transformers", "peft", "torch")
        return (State.INACTIVE if target.only else State.PATCHED) if is_imported else State.WAITING

    targets = tuple(TargetStatus(target.name, state_of(target), hits.pop(target.name, 0)) for target in TARGETS)
    printed = str(Status(enabled=True, targets=targets, shapes={}, errors=()))
    counts = re.sub(
        r"^  \d+ (more.*)$", lambda line: "  ... " + re.sub(r"\b\d+ ", "", line[1]), printed, flags=re.MULTILINE
    )
    assert counts.startswith(shown) and not hits


@pytest.mark.parametrize("file", sorted(render_docs.figures.DATA.glob("*.json")), ids=lambda file: file.name)
def test_data_file_is_whole_and_named_by_its_command(file):
    patterns = {re.escape(name).replace("GPU", "(h200|h100)") for name in render_docs.figures.sources()}
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
    monkeypatch.setattr(render_docs.figures, "DATA", folder)
    return bench


def test_what_the_bench_writes_is_what_is_rendered(tmp_path, monkeypatch):
    sides = {"nf4_patch": Times((2.0,)), "bitsandbytes": Times((5.0,)), "ceiling": Times((1.0,))}
    monkeypatch.setattr(render_docs.tables, "SHAPES", ["64x64 bf16", "64x128 bf16"])
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
    monkeypatch.setattr(render_docs.tables, "DATA", tmp_path / "docs" / "data")
    shown = render_docs.BLOCKS["install"]()
    assert f"pip install git+{address}\n" in shown
    assert "colab.research.google.com/github/someone/nf4_patch/blob/main/examples/t4_colab.ipynb" in shown


def test_every_data_file_is_written_by_a_command_that_exists():
    assert len(render_docs.figures.sources()) > 10
    for command in render_docs.figures.sources().values():
        program, *words = command.split()
        if program == "nf4-patch":
            assert words[0] in main.commands, command
        else:
            assert importlib.util.find_spec(words[1]) if words[0] == "-m" else (ROOT / words[0]).exists(), command


@pytest.mark.parametrize(
    ("slower", "fused", "clear"),
    [
        (0, "yes", True), (5, "yes", True), (1, "yes", True), (2, "yes", False),  # four of five rounds, three of five
        (0, "no", False),  # the fused matmul did not run
    ],
)  # fmt: skip
def test_when_a_difference_is_clear(slower, fused, clear):
    stock = render_docs.figures.STOCK
    sides = {"nf4_patch": Times((9,) * (5 - slower) + (11,) * slower), stock: Times((10,) * 5)}
    row = Row("batch 1", "ms", sides, {stock: Check(True, "")}, notes={"fused": fused}).as_dict()
    row["noise"] = dict.fromkeys(sides, 0.05)
    assert render_docs.figures.clear(row, stock) is clear
    assert render_docs.figures.side_of(row, stock)["won"].startswith("*") is not clear  # in italics where it is not


def test_gpus_in_the_readme_are_called_what_there_are_data_of():
    """Measured: timed there. Verified: the code that it runs gave the same bits. Else machine code alone was looked at."""
    figures = render_docs.figures
    table = README.read_text().split("| your GPU | status |")[1].split("\n\n")[0]
    status = {arch: row for row in table.splitlines() for arch in re.findall(r"sm_(\d+)", row)}
    timed = {data["machine"]["capability"]: gpu for gpu, _, data in figures.of_gpus("bench")}
    assert {arch for arch, row in status.items() if "**measured**" in row} == timed.keys()
    for name, words in (("bench", "**measured** ("), ("verify", "verified bit by bit (")):
        assert words + " and ".join(gpu for gpu, _, _ in figures.of_gpus(name)) + ")" in table
    verified = {arch for arch in status if any(figures.of_gpus(f"verify-sm{arch}"))}
    assert {arch for arch, row in status.items() if "**proven, not run**" in row} == verified
    counted = {row["arch"] for row in figures.load("instructions.json")["kernels"]}
    assert all(f"sm_{arch}" in counted for arch in status) and len(status) == len(counted)


def test_troubleshooting_says_more_of_reasons_and_not_the_same_again():
    """The table is generated; under it stands what the sentence and the advice of a reason do not say."""
    more = written(ROOT / "docs" / "troubleshooting.md").split("## Reasons")[1]
    named = [
        name for names in re.findall(r"^\* \*\*([^*]+)\*\*:", more, flags=re.MULTILINE) for name in names.split(", ")
    ]
    assert len(named) == more.count("\n* ") + 2 == len(set(named)) and set(named) <= Reason.__members__.keys()
    text = " ".join(more.split()).lower()
    for reason in Reason:
        assert reason.sentence.lower() not in text and (not reason.advice or reason.advice.lower() not in text), (
            reason.name
        )


def test_functions_that_the_design_page_names_exist():
    from nf4_patch.cache.kept import Kept
    from nf4_patch.nf4.dequantize import launch
    from nf4_patch.nf4.weight import Weight
    from nf4_patch.patching import guards, hooks, placement, quant_state, replacement
    from nf4_patch.patching.dequantizer import Dequantizer

    known = {each.__name__.rpartition(".")[2]: each for each in (launch.Launch, Weight, Kept, Dequantizer)}
    known |= {
        each.__name__.rpartition(".")[2]: each for each in (launch, guards, hooks, placement, quant_state, replacement)
    }
    path = (ROOT / "docs" / "design.md").read_text().split("## From `enable()`")[1].split("## Import order")[0]
    names = [name.split(".") for name in re.findall(r"`([A-Za-z_]+\.[a-z_]+)`", path) if not name.endswith(".py")]
    assert len(names) > 10
    for owner, function in names:
        assert hasattr(known[owner], function), f"{owner}.{function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, (
                f"{link}#{heading}"
            )


def test_tables_that_contributing_names_exist():
    found = re.findall(r"`([A-Z_]+)` in `([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(found) > 4
    for table, file in found:
        assert re.search(rf"^{table}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file}: {table}"


def test_tests_that_the_docs_name_exist():
    for page in PAGES:
        for name in re.findall(
            r"`(?:tests/)?((?:gpu|integration|nf4|patching|support|tools)/test_\w+\.py)", page.read_text()
        ):
            assert (ROOT / "tests" / name).exists(), f"{page.name}: {name}"


def test_every_example_is_in_the_gallery():
    scripts = {p.name for p in (ROOT / "examples").glob("*.*") if p.suffix in (".py", ".ipynb", ".yaml", ".json")}
    for name in scripts - {"offline.py", "record.py"}:  # what the examples share
        assert f"(../examples/{name})" in (ROOT / "docs" / "examples.md").read_text(), name


def test_every_page_is_in_the_menu():
    menu = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or f"\n{page.stem}\n" in menu, page.name


def test_commands_exist():
    for page in PAGES:
        text = page.read_text()
        for verb in re.findall(r"nf4-patch ([a-z]+)\b(?! is)", text):
            assert verb in main.commands, f"{page.name}: nf4-patch {verb}"
        for script in re.findall(r"\bscripts/[\w.]+\w", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_report_forms_ask_for_doctor_and_status():
    yaml = pytest.importorskip("yaml")
    forms = {file.name: yaml.safe_load(file.read_text()) for file in (ROOT / ".github").rglob("*.yml")}
    asked = [part["attributes"]["label"] for part in forms["problem.yml"]["body"] if part.get("validations")]
    assert any("nf4-patch doctor" in label for label in asked) and any("status()" in label for label in asked)


@pytest.mark.full
def test_site_builds_without_warnings():
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    subprocess.run([ROOT / "scripts" / "docs"], check=True, env={**os.environ, "PYTHON": sys.executable})


def modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(nf4_patch.__path__, "nf4_patch.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", ["nf4_patch", *modules()])
def test_docstrings_render_without_warnings(name):
    """As sphinx's napoleon and docutils read them; without these, that every line of Args has its name."""
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    documented = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
    ]
    for node in documented:
        text = ast.get_docstring(node)
        if not isinstance(node, ast.FunctionDef) or "Args:" not in text:
            continue
        arguments = node.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        body = text.split("Args:")[1].split("\n\n")[0]
        for argument in re.findall(r"^    (\w+)(?:, \w+)*:", body, flags=re.MULTILINE):
            assert argument in names, f"{name}.{node.name} documents {argument}, which it does not take"
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    docutils = pytest.importorskip("docutils.core")
    for node in documented:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rst = str(napoleon.GoogleDocstring(ast.get_docstring(node)))
            rst = re.sub(r":(py:)?\w+:`", "`", rst)  # sphinx's roles, which docutils does not know
            docutils.publish_doctree(rst, settings_overrides={"halt_level": 2, "report_level": 2})


def test_every_figure_of_a_gpu_says_what_it_measures():
    release = runpy.run_path(str(ROOT / "scripts" / "release"))
    files = [file.name for file in (ROOT / "docs" / "data").glob("*-h?00.json")]
    assert files and not [name for name in files if not any(map(name.startswith, release["MEASURES"]))]
    for path in {path for paths in release["MEASURES"].values() for path in paths}:
        assert (ROOT / "nf4_patch" / path).exists(), path
