"""Run the project's tests with other releases of the patched libraries.

    python scripts/release_matrix.py                  every cell
    python scripts/release_matrix.py "wrapt 1.16.0"   only these cells
    python scripts/release_matrix.py --as "torch 2.8.0" installed    record the row under this name

A *cell* puts other releases before the installed ones on the path, and runs tests and `nf4-patch doctor` in separate
processes. The cell's row in docs/data/releases.json has the test results and doctor's state of each target, by cell and
machine. Run scripts/render_docs.py afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("NF4_RELEASES", ROOT / ".releases"))
RECORD, CPU = ROOT / "docs" / "data" / "releases.json", "CPU (Triton's interpreter)"
EVERY = ("tests/integration/test_every_release.py",)  # also for releases that lack features which other tests need
TESTS = ("tests/patching/test_patching.py", "tests/patching/test_switch.py", "tests/tools/test_fuzz.py", *EVERY)
# The tests that need the extra "bench".
EXAMPLES = (*(f"tests/integration/test_examples.py::test_{name}" for name in ("peft", "merge", "generate")),)


class Cell(NamedTuple):
    """Releases, as pip requirements, that replace installed releases. Their dependencies are not installed."""

    packages: tuple[str, ...] = ()
    tests: tuple[str, ...] = TESTS
    unsloth: bool = False  # import Unsloth too


def unsloth(release: str, zoo: str) -> Cell:
    return Cell((f"unsloth=={release}", f"unsloth_zoo=={zoo}"), unsloth=True)


LOWEST = "bitsandbytes==0.50.0 transformers==4.56.0 peft==0.15.0 accelerate==1.0.0 matplotlib==3.9.0 wrapt==1.16.0 " \
         "click==8.1.0 packaging==22.0 tokenizers==0.22.0 huggingface_hub==0.34.0"  # fmt: skip
OLD = "transformers==4.51.3 tokenizers==0.21.4 huggingface_hub==0.36.0 peft==0.15.2 accelerate==1.6.0"
CELLS = {
    "installed": Cell(tests=("tests/nf4/test_kernels.py", "tests/patching/test_compile.py", *TESTS)),
    **{f"bitsandbytes {release}": Cell((f"bitsandbytes=={release}",), EVERY)
       for release in ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2")},
    "bitsandbytes 0.50.2": Cell(("bitsandbytes==0.50.2",)),
    "unsloth 2026.6.9": unsloth("2026.6.9", "2026.6.7"),
    "unsloth 2026.9.7": unsloth("2026.9.7", "2026.9.9"),
    "unsloth 2026.9.14": unsloth("2026.9.14", "2026.9.9"),
    "unsloth 2026.10.9": unsloth("2026.10.9", "2026.10.9"),
    "lowest": Cell((*LOWEST.split(),), (*TESTS, *EXAMPLES)),  # the lowest releases in pyproject.toml, with the installed torch
    "wrapt 1.16.0": Cell(("wrapt==1.16.0",)),
    "wrapt 2.0.1": Cell(("wrapt==2.0.1",)),
    "peft 0.15.2": Cell(("peft==0.15.2",)),
    "transformers 5.0.0": Cell(("transformers==5.0.0", "tokenizers==0.22.2")),
    "transformers 5.24.0, peft 0.21.2": Cell(("transformers==5.24.0", "peft==0.21.2")),
    "transformers 4.51.3, peft 0.15.2": Cell((*OLD.split(),), EVERY),
}  # fmt: skip


def run(name: str) -> dict[str, Any]:
    """Run a cell and return its row. If the cell cannot be installed, the row says so."""
    cell = CELLS[name]
    path = CACHE / "_".join(package.replace("==", "-") for package in cell.packages)
    if cell.packages and not path.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(path), *cell.packages]
        if code := subprocess.run(pip).returncode:
            return {"cell": name, "result": f"FAILED: pip ended with {code}"}
    environ = {key: value for key, value in os.environ.items() if not key.startswith("NF4_")}
    paths = [*[str(path)] * bool(cell.packages), str(ROOT), environ.get("PYTHONPATH", "")]
    environ |= {"UNSLOTH_ALLOW_CPU": "1", "PYTHONPATH": os.pathsep.join(paths), "TEST_UNSLOTH": "1" * cell.unsloth}
    with tempfile.TemporaryDirectory() as folder:
        report, results = Path(folder, "doctor.json"), Path(folder, "tests.xml")
        doctor = ["nf4_patch", "doctor", "--json", report, *["--unsloth"] * cell.unsloth]
        pytest = ["pytest", "-p", "no:cacheprovider", "-m", "not full and not slow", "--junitxml", results, *cell.tests]
        for command in (doctor, pytest):
            subprocess.run([sys.executable, "-m", *command], env=environ, cwd=ROOT, stdout=sys.stderr)
        if not (report.exists() and results.exists()):
            return {"cell": name, "result": "FAILED: the tests or doctor did not run"}
        found = json.loads(report.read_text())
        cases = [*ElementTree.parse(results).iter("testcase")]
    failed = [case.get("name", "") for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    result = f"{len(cases) - len(failed) - skipped} tests passed" + f", {skipped} skipped" * bool(skipped)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cell": name,
        "place": "{name} (sm_{capability[0]}{capability[1]})".format(**found["gpus"][0]) if found["gpus"] else CPU,
        "result": result + f"; FAILED: {', '.join(failed)}" * bool(failed),
        "releases": {key: found["releases"][key] for key in found["releases"] if cell.unsloth or "unsloth" not in key},
        "python": sys.version.split()[0],
        "targets": {target["name"]: target["state"] for target in found["targets"]},
        "tests": cell.tests,
        "commit": head.stdout.strip() or "not in a checkout",
    }


def record(row: dict[str, Any]) -> None:
    """Save a row in place of the row of the same cell and machine, in the order of CELLS."""
    rows = {(each["cell"], each["place"]): each for each in (*json.loads(RECORD.read_text()), row)}
    order = {name: place for place, name in enumerate(CELLS)}
    keys = sorted(rows, key=lambda key: ("CPU" in key[1], order.get(key[0], len(order)), key[0]))
    RECORD.write_text(json.dumps([rows[key] for key in keys], indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="name", help="record the row under this name; requires exactly one cell")
    parser.add_argument("cells", nargs="*", choices=[*CELLS, []], metavar="CELL", help=", ".join(CELLS))
    arguments = parser.parse_args()
    if arguments.name and len(arguments.cells) != 1:
        parser.error("--as NAME requires exactly one cell")
    failed = 0
    for name in arguments.cells or CELLS:
        row = run(name) | ({"cell": arguments.name} if arguments.name else {})
        print(f"{row['cell']}: {row['result']}", flush=True)
        failed += "FAILED" in row["result"]
        if "place" in row:
            record(row)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
