#!/usr/bin/env python
"""Kernel checks for developers of nf4_patch.

    python scripts/check_kernel.py fuzz 10000 --seed 1    compare random and malformed states with bitsandbytes
    python scripts/check_kernel.py older-gpu sm_75        run nf4-patch verify on the code for an older GPU

Both accept --json FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks import run_alone
from nf4_patch.tools.report import Progress, Report


@click.command()
@click.argument("cases", type=click.IntRange(min=1))
@click.option(
    "--seed", type=click.IntRange(0, 2**40), default=0, show_default=True, help="The same seed repeats the same states."
)
@click.pass_obj
def fuzz(tell: Progress, cases: int, seed: int) -> Report:
    """Compare the kernel with bitsandbytes on CASES random and malformed states."""
    import fuzz

    return fuzz.fuzz(cases, seed, tell=tell)


@click.command()
@click.argument("arch")
@click.pass_obj
def older_gpu(tell: Progress, arch: str) -> Report:
    """Verify the code that an older GPU would run. The driver translates this code for this GPU. ARCH is sm_75, 75 or 7.5."""
    import machine_code
    import portable

    return portable.verified(machine_code.capability_of(arch), tell)


COMMANDS = {"fuzz": fuzz, "older-gpu": older_gpu}

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        sys.exit(__doc__)
    run_alone(COMMANDS[name], f"python scripts/check_kernel.py {name}")
