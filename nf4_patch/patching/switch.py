"""What every replacement consults at every call: on or off, and with which options."""

from __future__ import annotations

from collections.abc import Callable

from .config import Config
from .option import OPTIONS
from .target import Target


class Gate:
    """Whether the rows of one option are on."""

    def __init__(self, on: bool = False) -> None:
        self.on = on


class Switch(Gate):
    """The patch itself, and a gate for each option.

    What else depends on them follows: it is told at once and at every change, so that this module imports neither torch
    nor what it switches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config: Config | None = None  # None: off
        self.strict = False
        # by ``only`` of a row
        self.gates: dict[str, Gate] = {"": self, "always": Gate(on=True), **{option: Gate() for option in OPTIONS}}
        self.followers: list[Callable[[Config | None], None]] = []

    def set(self, config: Config | None) -> None:
        """Put a configuration in force; None: off."""
        self.strict = config is not None and config.strict
        self.config, self.on = config, config is not None
        for option in OPTIONS:
            self.gates[option].on = self.value(option) != "off"
        for follower in self.followers:
            follower(config)

    def wants(self, target: Target) -> bool:
        """Return whether an option of the target is on, or the patch itself for a target without options."""
        return self.gates[target.option].on or (target.or_option != "" and self.gates[target.or_option].on)

    def value(self, option: str) -> str | int:
        """What is in force."""
        return "off" if self.config is None else self.config.options[option]

    def follow(self, follower: Callable[[Config | None], None]) -> None:
        self.followers.append(follower)
        follower(self.config)


switch = Switch()
