"""Run a script of examples/ in a separate process, with the patch on or off, and read its recorded results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

INTERPRETED = str(Path(__file__).with_name("interpreted"))
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")  # a free port: no run meets another
GLOO = (*TORCHRUN, Path(__file__).parents[1] / "programs" / "exit_without_finalization.py")


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without NF4_* variables. Without a GPU, every Triton kernel is interpreted."""
    values = {k: v for k, v in os.environ.items() if not k.startswith("NF4_")}
    values |= {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    values["PATH"] = f"{Path(sys.executable).parent}:{values['PATH']}"
    if torch.cuda.is_available():
        return values | changes
    values |= {"TRITON_INTERPRET": "1"} | changes
    return values | {"PYTHONPATH": os.pathsep.join(filter(None, [values.get("PYTHONPATH"), INTERPRETED]))}


def completed(
    command: Iterable[Any], cwd: Path, stderr: int = subprocess.PIPE, **changes: str
) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=environment(**changes), stdout=subprocess.PIPE, stderr=stderr, text=True)


def run(command: Iterable[Any], cwd: Path, **changes: str) -> str:
    """Run a command that must succeed. Return its stdout and stderr."""
    done = completed(command, cwd, subprocess.STDOUT, **changes)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_example(
    script: str | Path,
    *arguments: Any,
    folder: Path,
    patch: bool = True,
    launcher: tuple[Any, ...] = (),
    **changes: str,
) -> dict[str, Any]:
    """Return the JSON that ``script`` wrote. patch=False sets NF4_PATCH=0, so that the script runs the originals."""
    record = folder / f"{Path(script).stem}-{'on' if patch else 'off'}.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, *launcher, EXAMPLES / script, *arguments, "--json", record]
    changes = changes if patch else changes | {"NF4_PATCH": "0"}
    output = run(command, folder, **changes)
    return json.loads(record.read_text()) | {"output": output}


def hits(record: dict[str, Any]) -> int:
    return sum(target["hits"] for target in record["nf4_patch"]["targets"])


def fallbacks(record: dict[str, Any]) -> dict[str, int]:
    return {name: n for target in record["nf4_patch"]["targets"] for name, n in target["fallbacks"].items()}


def same_training(on: dict[str, Any], off: dict[str, Any]) -> bool:
    """Check that every loss and every trained parameter are bit-identical."""
    assert len(on["losses"]) == len(off["losses"]) > 0
    return on["losses"] == off["losses"] and on["adapter"] == off["adapter"]


def on_and_off(script: str, *arguments: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the script with the patch and without it. Check that both learned the same, and return what both wrote."""
    on = run_example(script, *arguments, **options)
    off = run_example(script, *arguments, patch=False, **options)
    assert same_training(on, off)
    return on, off
