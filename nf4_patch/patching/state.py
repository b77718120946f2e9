"""What became of a target."""

from __future__ import annotations

import enum


class State(str, enum.Enum):  # Python 3.11's StrEnum, for 3.10 as well
    """What became of a target in this process. The value is what people read and ``--json`` writes."""

    PATCHED = "patched"
    WRAPPED = "wrapped"  # another library's function calls ours
    DISPLACED = "displaced"  # another library's function, which does not call ours
    INACTIVE = "inactive"  # its option is off
    REFUSED = "refused"  # its function has another signature
    WAITING = "waiting"  # its module is not imported
    ABSENT = "absent"  # not in this release of the library
    OFF = "off"
    OWN = "own"  # no target: a part of this package that runs or fails by itself

    def __str__(self) -> str:
        return str(self.value)

    @property
    def was_patched(self) -> bool:
        """Whether our replacement was put there, whatever another library did later."""
        return self in (State.PATCHED, State.WRAPPED, State.DISPLACED)
