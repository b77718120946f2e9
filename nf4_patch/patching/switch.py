"""What every replacement consults at every call: on or off, and with which options."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Config

# What ``only`` of a row may be, and a value that switches it on.
SWITCHES = {"matmul": "auto", "cache": "6GiB", "experts": "4bit"}


class Gate:
    """Whether the rows of one feature are on."""

    def __init__(self) -> None:
        self.on = False


class Switch(Gate):
    """The patch itself and the options in force; the values are those of config.Config.

    What else depends on them follows: it is told at once and at every change, so that this module imports neither torch
    nor what it switches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config: Config | None = None  # None: off
        self.strict = False
        self.matmul = "off"
        self.cache: str | int = "off"
        self.experts = "off"
        self.gates: dict[str, Gate] = {"": self, **{feature: Gate() for feature in SWITCHES}}  # by ``only`` of a row
        self.followers: list[Callable[[Config | None], None]] = []

    def set(self, config: Config | None) -> None:
        """Put a configuration in force; None: off, with the options as they were."""
        if config is not None:
            self.strict, self.matmul, self.cache = config.strict, config.matmul, config.cache
            self.experts = config.experts
        self.config, self.on = config, config is not None
        for feature in SWITCHES:
            self.gates[feature].on = self.on and getattr(self, feature) != "off"
        for follower in self.followers:
            follower(config)

    def follow(self, follower: Callable[[Config | None], None]) -> None:
        self.followers.append(follower)
        follower(self.config)


switch = Switch()
