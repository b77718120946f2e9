"""Run ``nf4-patch`` and the commands of benchmarks in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from nf4_patch.tools.cli import main
from nf4_patch.tools.report import NotAvailable, silent


def output_of(*words: object, exit_code: int = 0, **variables: str) -> str:
    """Return the command's output, with these variables in its environment."""
    result = CliRunner().invoke(main, [str(word) for word in words], env=variables, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


def report_of(folder: Path, *words: object, exit_code: int = 0) -> dict[str, Any]:
    """Return the data that the command writes to --json, together with its output."""
    output = output_of(*words, "--json", folder / "report.json", exit_code=exit_code)
    return json.loads((folder / "report.json").read_text()) | {"output": output}


def run_with_gpu(benchmark: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a benchmark's command. Without a GPU, the command must refuse. It then runs as if there were a GPU."""
    if not torch.cuda.is_available():
        with pytest.raises(NotAvailable):
            benchmark.command(words, obj=silent, standalone_mode=False)
        monkeypatch.setattr(benchmark, "require_gpu", lambda: None)
    benchmark.command(words, obj=silent, standalone_mode=False)
