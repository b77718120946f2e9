"""The classes of environment variables and options. An option is a variable that is also an argument of ``enable``.

Each option's folder defines it in a module ``option``, which imports only this module and ``memory.waits`` from
nf4_patch, to keep ``import nf4_patch`` cheap.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..version import holds, release_of
from .target import Target
from .targets import TARGETS


class ConfigError(ValueError):
    """An environment variable or an argument of ``enable`` has a value that is not allowed."""


SWITCH = {"0": False, "1": True, "false": False, "true": True, "no": False, "yes": True, "off": False, "on": True}
UNITS = {"TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9}
UNITS |= {"MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1}
# A single letter is a binary unit (6G is 6 GiB), as in Docker, Slurm and coreutils. GB is decimal, as in accelerate's
# max_memory.
SPELLINGS = {unit.lower(): size for unit, size in UNITS.items()} | {
    letter: UNITS[f"{letter.upper()}iB"] for letter in "kmgt"
}
SMALLEST = 10**6  # a smaller number needs a unit, because the user probably did not mean bytes


def size_of(text: str) -> int | None:
    """Convert a size such as "6GiB", "6G", "6.5 GB" or "6442450944" to bytes. Return None for any other text."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in ("", *SPELLINGS):
        return None
    size = int(float(match[1]) * SPELLINGS.get(match[2], 1))
    return size if size <= sys.maxsize else None


def size_in_words(size: int) -> str:
    """Format a size in bytes in the unit in which it is exact, with at most four digits before the point and one after it.

    Otherwise round to three digits.
    """
    for unit, base in UNITS.items():
        if 10_000 * base > size >= base > 1 and 10 * size % base == 0:
            return f"{size / base:g} {unit}"
    for unit, base in UNITS.items():
        if size >= base and (base == 1 or "i" in unit):
            return f"{float(f'{size / base:.3g}'):g} {unit}"
    return "0 B"


@dataclass(frozen=True)
class Variable:
    """An environment variable of nf4_patch."""

    name: str
    allowed: tuple[str, ...]
    default: str  # the value if the variable is unset or empty; "" if that differs from every allowed value
    meaning: str
    size: bool = False  # whether amounts of memory, such as "6GiB", are allowed too
    option: bool = False  # whether the variable only changes how the patch works, without turning it on

    @property
    def argument(self) -> str:
        return self.name.removeprefix("NF4_PATCH_").lower()

    @property
    def values(self) -> tuple[str, ...]:
        """Return the allowed values as shown in the docs and in error messages."""
        size = "a size (`6GiB` or `6G` in units of 2^30 bytes, `6GB` in units of 10^9 bytes, `0` for off)"
        return (*(f"`{value}`" for value in self.allowed), *[size] * self.size)

    def word(self, text: str) -> str:
        """Return ``text``. Subclasses translate synonyms."""
        return text

    def parse(self, name: str, given: Any) -> Any:
        """Convert the user's value to an allowed value or to bytes. ``name`` is the argument or variable, for error messages.

        Raises:
            ConfigError: ``given`` is not allowed.
        """
        text = str(given).strip()
        value = self.word(text.lower()) or self.default
        shown = repr(given) if isinstance(given, str) else text
        shown = f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'}"
        if value in (*self.allowed, self.default):
            return value
        size = size_of(value) if self.size else None
        if size is None:
            unset = "unset" if name == self.name else "None"
            raise ConfigError(
                f"{shown} is not allowed. Allowed: {', '.join(self.values).replace('`', '')}, or {unset}. {self.meaning}"
            )
        if value[-1].isdigit() and 0 < float(value) < SMALLEST:
            raise ConfigError(f"{shown} would mean {value} bytes. Write {value}GiB, {value}MiB or {value}B")
        return size or "off"


@dataclass(frozen=True)
class Option(Variable):
    """An option, with its environment variable and its part of ``status()``."""

    option: bool = True
    on: str = ""  # an example of a value that turns the option on
    fast: str = ""  # the value in the profile "fast"; "" if the option needs a decision
    calls: str = ""  # what ``Effect.used`` counts, such as "layer calls"; "" if status shows only ``lines``
    idle: str = ""  # for an option without ``calls``: the message shown while the option is on but its report is empty
    # takes the option's current value, and returns the option's field of ``Status``
    report: Callable[[str | int], Any] | None = None
    lines: Callable[[Any], list[str]] | None = None  # formats the report as lines of text
    # takes the report, and returns how many calls the option handled. If None, kernel launches of ``targets`` are counted
    used: Callable[[Any], int] | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return the required targets whose field ``option`` is this option."""
        return tuple(target for target in TARGETS if target.option == self.argument and target.required)

    def word(self, text: str) -> str:
        """Translate "false" to "off". If only one value turns the option on, translate "true" to this value."""
        values = [value for value in self.allowed if value != "off"]
        if text == "true" and len(values) == 1 and not self.size:
            return values[0]
        return "off" if text == "false" else text

    def lacks(self) -> tuple[str, ...]:
        """Return the option's unmet requirements, such as "peft >= 0.17", or () if one of them is met, which is enough.

        A library without metadata, for example a checkout on PYTHONPATH, counts as installed.
        """
        missing: dict[str, None] = {}
        for target in self.targets:
            release = release_of(target.library)
            if release is None:
                installed = target.library in sys.modules or importlib.util.find_spec(target.library) is not None
            else:
                installed = holds(release, target.releases)
            if installed:
                return ()
            missing[f"{target.library} {target.releases}"] = None
        return tuple(missing)


FAST = "fast"  # the profile that turns on each option with a value ``Option.fast``
# Maps an argument of ``enable`` to its option. nf4_patch/options.py fills this table when the package is imported.
OPTIONS: dict[str, Option] = {}
