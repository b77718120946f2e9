"""What a variable of the environment may hold, and an option: a variable that is an argument of ``enable`` too.

Each option says itself in a module ``option`` of its own folder, which imports nothing of the package but this module and ``target``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .target import Target


class ConfigError(ValueError):
    """A variable or an argument holds a value that is not in its table row."""


SWITCH = {"0": False, "1": True, "false": False, "true": True, "no": False, "yes": True, "off": False, "on": True}
UNITS = {"TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9}
UNITS |= {"MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1}
# One letter is binary, as for Docker, Slurm and coreutils; GB is decimal, as in accelerate's max_memory.
SPELLINGS = {unit.lower(): size for unit, size in UNITS.items()} | {
    letter: UNITS[f"{letter.upper()}iB"] for letter in "kmgt"
}
SMALLEST = 10**6  # a number without a unit that is smaller hardly means bytes


def size_of(text: str) -> int | None:
    """The bytes of "6GiB", "6G", "6.5 GB" or "6442450944"; None where it is no size."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in ("", *SPELLINGS):
        return None
    size = int(float(match[1]) * SPELLINGS.get(match[2], 1))
    return size if size <= sys.maxsize else None


def size_in_words(size: int) -> str:
    """As people write it, "6 GiB" or "1.5 GB"; to three digits where neither unit has a round number."""
    for unit, base in UNITS.items():
        if size >= base > 1 and 10 * size % base == 0:
            return f"{size / base:g} {unit}"
    for unit, base in UNITS.items():
        if size >= base and (base == 1 or "i" in unit):
            return f"{float(f'{size / base:.3g}'):g} {unit}"
    return "0 B"


@dataclass(frozen=True)
class Variable:
    name: str
    allowed: tuple[str, ...]
    default: str  # what an unset or empty variable means; "" where that is a third state
    meaning: str
    size: bool = False  # an amount of memory is allowed too
    option: bool = False  # it changes what the patch does, and does nothing where the patch is off

    @property
    def argument(self) -> str:
        return self.name.removeprefix("NF4_PATCH_").lower()

    @property
    def values(self) -> tuple[str, ...]:
        """What may be given, in words."""
        more = ["a size (`6GiB` = `6G`, in units of 2^30 bytes; `6GB`, of 10^9; `0`: off)"] if self.size else []
        return (*(f"`{value}`" for value in self.allowed), *more)

    def parse(self, name: str, given: Any) -> Any:
        """What ``given``, the value of the argument or variable called ``name``, means.

        Raises:
            ConfigError: it is not allowed.
        """
        text = str(given).strip()
        value = text.lower() or self.default
        shown = repr(given) if isinstance(given, str) else text
        shown = f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'}"
        if value in (*self.allowed, self.default):
            return value
        size = size_of(value) if self.size else None
        if size is None:
            unset = "unset" if name == self.name else "None"
            raise ConfigError(
                f"{shown} is not known; allowed: {', '.join(self.values).replace('`', '')}, or {unset}. {self.meaning}"
            )
        if value[-1].isdigit() and 0 < float(value) < SMALLEST:
            raise ConfigError(f"{shown} would be {value} bytes. Which is meant: {value}GiB, {value}MiB or {value}B?")
        return size or "off"


@dataclass(frozen=True)
class Option(Variable):
    """A row of ``OPTIONS``: what it is called and allows, what it replaces, and what it says in ``status()``."""

    option: bool = True
    on: str = ""  # a value that switches it on, as "off" does off
    targets: tuple[Target, ...] = ()
    report: Callable[[str | int], Any] | None = None  # from what is in force: the field of ``Status`` of this name
    lines: Callable[[Any], list[str]] | None = None  # of the report, as people read it


# By argument of ``enable``. nf4_patch/options.py fills it while the package is imported, before anything reads it.
OPTIONS: dict[str, Option] = {}
