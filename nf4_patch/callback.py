"""A transformers TrainerCallback that reports how many calls ran in the kernel, and how many ran the original function.

>>> from nf4_patch.callback import ReportCallback
>>> trainer = SFTTrainer(..., callbacks=[ReportCallback()])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from transformers import TrainerCallback

from . import status
from .tools import output


class ReportCallback(TrainerCallback):
    """Report hits and fallbacks in a Trainer's logs and at the end of training.

    A hit is a call that ran in the kernel. A fallback is a call for which the original function ran. Every entry of
    ``trainer.state.log_history`` gets ``nf4_patch_hits`` and ``nf4_patch_fallbacks``, counted in this process since
    ``train()`` was called. When training ends, the main process prints ``nf4_patch.status()``.

    Args:
        json_file: a file to which the main process writes the status when training ends.
        quiet: if True, the status is not printed.

    Raises:
        ValueError: ``json_file`` cannot be written. The error is raised when training begins.
    """

    def __init__(self, json_file: str | Path | None = None, quiet: bool = False) -> None:
        self.json_file = None if json_file is None else output.absolute(json_file)
        self.quiet = quiet
        self._start = (0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.json_file is not None and state.is_world_process_zero:  # other processes may lack the folder
            try:
                output.OutputFile().convert(self.json_file)
            except click.BadParameter as error:
                raise ValueError(error.message) from None
        now = status()
        self._start = (now.hits, now.fallbacks)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        now = status()
        counts = {"nf4_patch_hits": now.hits - self._start[0], "nf4_patch_fallbacks": now.fallbacks - self._start[1]}
        if state.log_history:  # saved in trainer_state.json
            state.log_history[-1].update(counts)
        if logs is not None:  # seen by later callbacks
            logs.update(counts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        now = status()
        if not self.quiet:
            print(now)
        if self.json_file is not None:
            output.write_json(self.json_file, now.as_dict())
