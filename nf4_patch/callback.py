"""The report as a transformers TrainerCallback.

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
    """Follows a Trainer's run: what the kernel served since training began, in the logs and at the end.

    Every entry of ``trainer.state.log_history`` gets ``nf4_patch_hits`` and ``nf4_patch_fallbacks`` (of this
    process, since ``train()`` was called). When training ends the main process prints ``nf4_patch.status()``.

    Args:
        json_file: written there as well when training ends.
        quiet: print nothing.

    Raises:
        ValueError: when training begins, if ``json_file`` cannot be written.
    """

    def __init__(self, json_file: str | Path | None = None, quiet: bool = False) -> None:
        self.json_file = None if json_file is None else output.absolute(json_file)
        self.quiet = quiet
        self._start = (0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.json_file is not None and state.is_world_process_zero:  # only there the folder need exist
            try:
                output.OutputFile().convert(self.json_file)
            except click.BadParameter as error:
                raise ValueError(error.message) from None
        now = status()
        self._start = (now.hits, now.fallbacks)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        now = status()
        counts = {"nf4_patch_hits": now.hits - self._start[0], "nf4_patch_fallbacks": now.fallbacks - self._start[1]}
        if state.log_history:  # what trainer_state.json keeps
            state.log_history[-1].update(counts)
        if logs is not None:  # what callbacks after this one see
            logs.update(counts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        now = status()
        if not self.quiet:
            print(now)
        if self.json_file is not None:
            output.write_json(self.json_file, now.as_dict())
