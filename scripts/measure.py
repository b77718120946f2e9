#!/usr/bin/env python
"""Measure the figures of docs/data again on this machine's GPUs. Each GPU runs one benchmark at a time.

    python scripts/measure.py                                  every file of a GPU
    python scripts/measure.py step-cache bench                 only these files
    python scripts/measure.py recipe lengths -- --seconds 400  these files, with these arguments for each command

Run scripts/render_docs.py afterwards. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from render_docs import DATA, GPUS, sources


def main(words: list[str]) -> int:
    split = words.index("--") if "--" in words else len(words)
    wanted, arguments = words[:split], words[split + 1 :]
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "machine without a GPU"
    gpu = next((gpu.lower() for gpu in GPUS if gpu in found), None)
    if gpu is None:
        sys.exit(
            f"this is a {found}, but docs/data has figures of {' and '.join(GPUS)} (GPUS in scripts/render_docs.py)"
        )
    named = {file.removesuffix("-GPU.json"): command for file, command in sources().items() if "-GPU" in file}
    if unknown := set(wanted) - named.keys():
        sys.exit(f"unknown file: {', '.join(sorted(unknown))}. Known files are {', '.join(named)}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    devices = visible if visible[0] else [str(index) for index in range(torch.cuda.device_count())]
    free = queue.SimpleQueue[str]()
    for device in devices:
        free.put(device)

    def code_of(name: str, folder: str) -> int:
        device, begin, file = free.get(), time.monotonic(), Path(folder, f"{name}-{gpu}.json")
        command = shlex.split(named[name].replace("nf4-patch", "python -m nf4_patch"))
        words = [sys.executable, *command[1:], *arguments, "--json", str(file)]
        code = subprocess.run(words, cwd=DATA.parents[1], env=os.environ | {"CUDA_VISIBLE_DEVICES": device}).returncode
        print(f"{file.name}: exit {code} after {time.monotonic() - begin:.0f} s on GPU {device}", flush=True)
        free.put(device)
        return code

    # A file in docs/data would change the checkout, and the other files would then name a changed checkout.
    with tempfile.TemporaryDirectory() as folder:
        try:
            with ThreadPoolExecutor(len(devices)) as pool:
                codes = list(pool.map(partial(code_of, folder=folder), wanted or named))
        finally:
            for file in Path(folder).iterdir():
                shutil.move(file, DATA / file.name)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
