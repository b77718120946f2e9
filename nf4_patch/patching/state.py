"""The states of a target, which is a library function to replace."""

from __future__ import annotations

import enum


class State(str, enum.Enum):  # Python 3.11's StrEnum, for 3.10 as well
    """The state of a target in this process. Its value appears in reports and in ``--json`` files."""

    PATCHED = "patched"
    WRAPPED = "wrapped"  # another library wrapped the replacement and calls it
    DISPLACED = "displaced"  # another library put a function in place that does not call the replacement
    INACTIVE = "inactive"  # the target's option is off
    REFUSED = "refused"  # the function cannot be replaced, for example because its parameters are not supported
    WAITING = "waiting"  # the module is not imported
    ABSENT = "absent"  # this release of the library does not have the function
    OFF = "off"  # the patch is off
    OWN = "own"  # not a target: a function of this package that users call, such as ``dequantize_nf4``

    def __str__(self) -> str:
        return str(self.value)

    @property
    def was_patched(self) -> bool:
        """Return whether the replacement was in place at some time."""
        return self in (State.PATCHED, State.WRAPPED, State.DISPLACED)
