"""The reasons why the amount of spare memory is unknown, as data for ``status()``. This module imports no torch."""

from __future__ import annotations

import enum


class Waits(enum.Enum):
    """Why the users of spare memory have no budget."""

    TRAINING = "no training step was seen on a GPU yet"
    OPTIMIZER = "an optimizer creates its state"
    BATCH = "the largest batch so far has {0} tokens, sequences of {1}"
    MEMORY = "only {0} MiB were free on device {1}"
    OUT_OF_MEMORY = "a weight could not be decoded, because the GPU was out of memory"
    OTHER_PROCESS = "another process uses device {0}"
    MODEL = "a model was loaded"
    OTHER_OPTION = "another option shares the memory"
    MARGIN = "no more than the margin was free at the largest batch so far"
