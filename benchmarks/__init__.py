"""What is measured for the tables of docs/, on a GPU: ``python -m benchmarks.NAME --json FILE``. Not in the wheel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import click

from nf4_patch.tools.bench.record import Bench, Row
from nf4_patch.tools.bench.timing import machine
from nf4_patch.tools.cli import run_alone
from nf4_patch.tools.patch import require_patch
from nf4_patch.tools.report import Progress, require_gpu


def main(section: str, method: str, rows: Callable[[Progress], Iterable[Row]]) -> None:
    """The command of the benchmark that Python was started with: its rows, by ``method``, as a section of the report."""
    module = sys.modules["__main__"]
    assert module.__spec__ is not None, "run as python -m benchmarks.NAME"

    @click.command(help=(module.__doc__ or "").partition(": ")[2])
    @click.pass_obj
    def command(tell: Progress) -> Bench:
        require_gpu()
        require_patch()
        return Bench(machine(), {section: list(rows(tell))}, {section: method})

    run_alone(command, f"python -m {module.__spec__.name}")
