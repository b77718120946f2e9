"""Try every mixture of experts of the installed transformers with packed experts, for the table in docs/data/tables.md.

    python scripts/mixtures.py --json docs/data/mixtures.json

Models are tiny and have random weights. The run takes two minutes on a CPU and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from every_mixture import mixtures, walked

RELEASES = ("transformers", "peft", "bitsandbytes", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders of transformers.models; default: all")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    rows = {}
    for name, kind in mixtures().items():
        if (not arguments.names or name in arguments.names) and (row := walked(name, kind)):
            rows[name] = row
            print(name, *(f"{column}: {found}" for column, found in row.items() if found != "yes"), sep="\n    ")
    if arguments.json:
        releases = {name: metadata.version(name) for name in RELEASES}
        arguments.json.write_text(json.dumps({"releases": releases, "mixtures": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
