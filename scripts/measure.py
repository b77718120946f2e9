#!/usr/bin/env python
"""Measure the figures of docs/data again on this machine's GPU.

    python scripts/measure.py                  every file
    python scripts/measure.py step-cache bench only these files

Run scripts/render_docs.py afterwards. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time

import torch
from render_docs import DATA, GPUS, sources


def main(wanted: list[str]) -> int:
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "machine without a GPU"
    gpu = next((gpu.lower() for gpu in GPUS if gpu in found), None)
    if gpu is None:
        sys.exit(
            f"this is a {found}, but docs/data has figures of {' and '.join(GPUS)} (GPUS in scripts/render_docs.py)"
        )
    named = {file.removesuffix("-GPU.json"): command for file, command in sources().items() if "-GPU" in file}
    if unknown := set(wanted) - named.keys():
        sys.exit(f"unknown file: {', '.join(sorted(unknown))}. Known files are {', '.join(named)}")
    failed = 0
    for name, command in named.items():
        if name not in (wanted or named):
            continue
        file, begin = DATA / f"{name}-{gpu}.json", time.monotonic()
        words = shlex.split(command.replace("nf4-patch", "python -m nf4_patch"))
        code = subprocess.run([sys.executable, *words[1:], "--json", str(file)], cwd=DATA.parents[1]).returncode
        print(f"{file.name}: exit {code} after {time.monotonic() - begin:.0f} s", flush=True)
        failed += code != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
