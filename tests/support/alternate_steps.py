"""Run an example with the patch on and off in turns, a step each, in one process: alternate_steps.py SCRIPT ARGUMENTS.

Two processes may differ by more than the patch does: qlora_peft.py took 75.2 ms a step in one without it and 51.8 in one
with it, in turns 56.7 and 48.6 (H200, torch 2.11, bitsandbytes 0.50.2). The seconds of every step go into the example's
--json.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import wrapt

import nf4_patch

TURNS = ("on", "off", "off", "on")  # of a drift both sides get as much


@wrapt.when_imported("record")  # of examples/, not imported here: Unsloth wants to be imported before what it imports
def take_turns(module) -> None:
    step = module.Record.step
    turns: dict[str, list[float]] = {"on": [], "off": []}

    def step_and_switch(record, *arguments) -> None:
        """What Record.step does; then the patch as the next step wants it, untimed."""
        step(record, *arguments)
        done = len(record.seconds)
        turns[TURNS[(done - 1) % 4]].append(record.seconds[-1])
        record.extra["turns"] = turns
        (nf4_patch.enable if TURNS[done % 4] == "on" else nf4_patch.disable)()
        record.clock()

    module.Record.step = step_and_switch


del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
