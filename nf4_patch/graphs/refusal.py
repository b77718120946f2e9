"""Why a layer has no graphs."""

from __future__ import annotations

from typing import NamedTuple

from ..patching.reasons import Reason


class Refused(NamedTuple):
    """What is remembered of a Refusal. An exception would keep the frames that raised it alive, and with them the model."""

    reason: Reason
    detail: str


class Refusal(Exception):
    """Says that a layer cannot be recorded, and what was found in the layer."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.refused = Refused(reason, detail)
