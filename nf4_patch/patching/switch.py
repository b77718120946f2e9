"""What every replacement consults at every call: on or off, and with which options."""

from __future__ import annotations


class Switch:
    """The options in force, set by hooks.enable and hooks.disable; the values are those of config.Config."""

    def __init__(self) -> None:
        self.on = False
        self.strict = False
        self.defer = "auto"
        self.matmul = "off"
        self.cache: str | int = "off"


switch = Switch()
