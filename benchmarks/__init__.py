"""Benchmarks for the tables in docs/, on a GPU: ``python -m benchmarks.NAME --json FILE``. Not part of the wheel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from benchmarks.record import Check, Row, table
from benchmarks.timing import Call, Inside, Machine, Taken, alternating, kernels, machine, synchronize
from nf4_patch.tools import cli
from nf4_patch.tools.report import Progress, Report, require_gpu, require_patch


@dataclass(frozen=True)
class Bench(Report):
    """Results of a benchmark, by section of the report."""

    machine: Machine
    sections: dict[str, list[Row]] = field(default_factory=dict)
    method: dict[str, str] = field(default_factory=dict)  # by section

    def problems(self) -> list[str]:
        every = (f"{name}, {text}" for name, rows in self.sections.items() for row in rows for text in row.failures)
        return list(dict.fromkeys(every))

    def render(self) -> Iterable[str]:
        yield str(self.machine)
        shown = ""
        for name, rows in self.sections.items():
            yield ""
            if self.method[name] != shown:
                shown = self.method[name]
                yield shown
            yield table(name, rows)
        yield from self.problems()

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": vars(self.machine),
            "method": self.method,
            "sections": {name: [row.as_dict() for row in rows] for name, rows in self.sections.items()},
            "failures": self.problems(),
            "exit_code": self.exit_code,
        }


def run_alone(command: click.Command, invocation: str) -> None:
    """Run a benchmark or a script like a command of ``nf4-patch``: with --json, with progress, and with errors in one line.

    Args:
        invocation: the command line, for example "python -m benchmarks.challenge".
    """
    program, _, name = invocation.rpartition(" ")
    cli.main.add_command(command, name)
    cli.main([name, *sys.argv[1:]], prog_name=program)


def bits(same: Mapping[str, bool]) -> dict[str, Check]:
    """Return a check for each baseline: whether nf4_patch's result was bit-identical before anything was timed."""
    says = {True: "bit-identical to", False: "the bits differ from"}
    return {name: Check(equal, f"{says[equal]} {name}") for name, equal in same.items()}


def kernel_times(variants: Mapping[str, Call], inside: Inside, rounds: int) -> Taken:
    """Return the summed milliseconds of each variant's kernels and copies.

    A variant is missing if the profiler sees no kernels, for example without CUPTI.
    """

    def gpu_busy_ms(call: Call) -> float:
        return sum(ms for _, ms in kernels(call))

    kernels(synchronize)  # starts the profiler
    taken = alternating(variants, gpu_busy_ms, rounds, inside, warmups=0)
    return {name: times for name, times in taken.items() if all(times.values)}


def gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


def main(method: Mapping[str, str] | str, rows: Callable[[Progress], Mapping[str, Iterable[Row]]]) -> None:
    """Run the benchmark that Python was started with.

    Args:
        method: how the rows are measured, by section, or one text for all sections.
        rows: measures and returns the rows by section.
    """
    module = sys.modules["__main__"]
    assert module.__spec__ is not None, "run as python -m benchmarks.NAME"

    @click.command(help=(module.__doc__ or "").partition(": ")[2])
    @click.pass_obj
    def command(tell: Progress) -> Bench:
        require_gpu()
        require_patch()
        sections = {name: list(found) for name, found in rows(tell).items()}
        return Bench(machine(), sections, dict.fromkeys(sections, method) if isinstance(method, str) else dict(method))

    run_alone(command, f"python -m {module.__spec__.name}")
