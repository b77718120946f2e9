"""An exception, and its data, that say why a layer has no graphs."""

from __future__ import annotations

from typing import NamedTuple

from ..patching.reasons import Reason


class Refused(NamedTuple):
    """The data of a Refusal. The exception itself would keep its frames alive, and with them the model."""

    reason: Reason
    detail: str


class Refusal(Exception):
    """Raised if a layer cannot be recorded."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.refused = Refused(reason, detail)
