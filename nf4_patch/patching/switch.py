"""The switch that tells each replacement, at every call, whether the patch and its options are on."""

from __future__ import annotations

from collections.abc import Callable

from .config import Config
from .option import OPTIONS
from .target import ALWAYS, Target


class Gate:
    """A switch shared by all targets of one option."""

    def __init__(self, on: bool = False) -> None:
        self.on = on


class Switch(Gate):
    """The state of the patch, with one gate per option.

    Code that depends on it registers a function with ``follow``, so that this module imports neither that code nor torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config: Config | None = None  # None while the patch is off
        self.strict = False
        # the gate of each ``Target.option``
        self.gates: dict[str, Gate] = {"": self, ALWAYS: Gate(on=True), **{option: Gate() for option in OPTIONS}}
        self.followers: list[Callable[[Config | None], None]] = []

    def set(self, config: Config | None) -> None:
        self.strict = config is not None and config.strict
        self.config, self.on = config, config is not None
        for option in OPTIONS:
            self.gates[option].on = self.value(option) != "off"
        for follower in self.followers:
            follower(config)

    def wants(self, target: Target) -> bool:
        """Return whether one of the target's options is on or, for a target without options, whether the patch is on."""
        return self.gates[target.option].on or (target.or_option != "" and self.gates[target.or_option].on)

    def value(self, option: str) -> str | int:
        """Return an option's value, or "off" while the patch is off."""
        return "off" if self.config is None else self.config.options[option]

    def follow(self, follower: Callable[[Config | None], None]) -> None:
        """Call ``follower`` now and at every change."""
        self.followers.append(follower)
        follower(self.config)


switch = Switch()
