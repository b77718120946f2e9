"""The environment: one table of variables, one frozen Config. Read by patching and tools, never by nf4."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A variable or an argument holds a value that is not in its table row."""


SWITCH = {"0": False, "1": True, "false": False, "true": True, "no": False, "yes": True, "off": False, "on": True}


@dataclass(frozen=True)
class Variable:
    name: str
    allowed: tuple[str, ...]
    default: str  # what an unset or empty variable means; "" where that is a third state
    meaning: str
    suffix: str = ""  # a path that ends so is allowed too
    size: bool = False  # an amount of memory is allowed too
    option: bool = False  # it changes what the patch does, and does nothing where the patch is off
    on: str = ""  # of an option that is an argument of ``enable`` too: a value that switches it on, as "off" does off

    @property
    def argument(self) -> str:
        return self.name.removeprefix("NF4_PATCH_").lower()

    @property
    def values(self) -> tuple[str, ...]:
        """What may be given, in words."""
        more = [f"a path to a `{self.suffix}`"] if self.suffix else []
        more += ["a size (`6GiB` = `6G`, in units of 2^30 bytes; `6GB`, of 10^9; `0`: off)"] if self.size else []
        return (*(f"`{value}`" for value in self.allowed), *more)


VARIABLES = (
    Variable(
        "NF4_PATCH", (*SWITCH,), "",
        "1: enable with no change of code (bitsandbytes >= 0.46, or on `import nf4_patch`). "
        "0: stay off, whatever the code says. Unset: the code decides.",
    ),
    Variable("NF4_USE_TRITON", (*SWITCH,), "1", "0: the same off-switch under another project's name."),
    Variable(
        "NF4_PATCH_STRICT", (*SWITCH,), "0",
        "1: raise where a 4-bit weight would fall back to the original, "
        "and where a cached weight is not what its bytes decode to.",
        option=True,
    ),
    Variable(
        "NF4_PATCH_MATMUL", ("off", "auto"), "off",
        "auto: multiply few rows (generation, short sequences) straight from the packed weight where measured to win. "
        "Off by default: as accurate, but not the same bits as the original.",
        option=True, on="auto",
    ),
    Variable(
        "NF4_PATCH_CALIBRATION", ("auto", "off"), "auto",
        "The file of `nf4-patch calibrate`, which takes precedence over the shipped tables of what is measured to win. "
        "auto: nf4_patch/calibration.json in $XDG_CACHE_HOME or ~/.cache; off: the shipped tables only.",
        suffix=".json", option=True,
    ),
    Variable(
        "NF4_PATCH_CACHE", ("off", "auto"), "off",
        "Keep dequantized weights for the functions that only read them, with the same bits. A size: as many as fit into "
        "that much memory of every GPU; auto: as many as fit into what the training leaves free.",
        size=True, option=True, on="6GiB",
    ),
    Variable(
        "NF4_PATCH_EXPERTS", ("off", "4bit"), "off",
        "4bit: transformers' load_in_4bit packs the experts of a mixture too. Off by default: another quantization.",
        option=True, on="4bit",
    ),
    Variable(
        "NF4_PATCH_LORA", ("off", "fused"), "off",
        "fused: peft's LoRA on 4-bit linear layers as one function. Off by default: as accurate, but not the same bits as peft's.",
        option=True, on="fused",
    ),
    Variable(
        "NF4_PATCH_OFFLOAD", ("off", "all"), "off",
        "Packed experts wait in host memory and are fetched ahead, with the same bits. A size: so much of them, and of what is in "
        "flight, stays on every GPU; all: only what is in flight. For models that are loaded from then on, with experts=4bit.",
        size=True, option=True, on="6GiB",
    ),
)  # fmt: skip
OPTIONS = {variable.argument: variable for variable in VARIABLES if variable.on}

UNITS = {"TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9}
UNITS |= {"MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1}
# One letter is binary, as for Docker, Slurm and coreutils; GB is decimal, as in accelerate's max_memory.
SPELLINGS = {unit.lower(): size for unit, size in UNITS.items()} | {
    letter: UNITS[f"{letter.upper()}iB"] for letter in "kmgt"
}
SMALLEST = 10**6  # a number without a unit that is smaller hardly means bytes


def size_of(text: str) -> int | None:
    """The bytes of "6GiB", "6G", "6.5 GB" or "6442450944"; None where it is no size.

    Raises:
        ConfigError: a number without a unit, and so small that it hardly means bytes.
    """
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in ("", *SPELLINGS):
        return None
    size = int(float(match[1]) * SPELLINGS.get(match[2], 1))
    if not match[2] and 0 < float(match[1]) < SMALLEST:
        raise ConfigError(f"would be {match[1]} bytes. Which is meant: {match[1]}GiB, {match[1]}MiB or {match[1]}B?")
    return size if size <= sys.maxsize else None


def size_in_words(size: int) -> str:
    """As people write it, "6 GiB" or "1.5 GB"; to three digits where neither unit has a round number."""
    for unit, base in UNITS.items():
        if size >= base > 1 and 10 * size % base == 0:
            return f"{size / base:g} {unit}"
    for unit, base in UNITS.items():
        if size >= base and (base == 1 or "i" in unit):
            return f"{size / base:.3g} {unit}"
    return "0 B"


def options_set() -> list[str]:
    """ "NAME=value" of every option in the environment that asks for something."""
    given = {v: os.environ.get(v.name, "").strip() for v in VARIABLES if v.option}
    asks = [v for v, text in given.items() if text.lower() not in ("", v.default) and SWITCH.get(text.lower(), True)]
    return [f"{v.name}={given[v]}" for v in asks]


def keeps_off(environ: Mapping[str, str] = os.environ) -> str:
    """The variables that keep the patch off, "NF4_PATCH=0" for example; "" where none does."""
    given = {name: environ.get(name, "").strip() for name in ("NF4_PATCH", "NF4_USE_TRITON")}
    return " and ".join(f"{name}={text}" for name, text in given.items() if not SWITCH.get(text.lower(), True))


def unknown_variables() -> list[str]:
    """A sentence on every NF4_PATCH_* variable in the environment that is in no row of VARIABLES: misspelled, or gone."""
    names = [variable.name for variable in VARIABLES]
    unknown = sorted(name for name in os.environ if name.startswith("NF4_PATCH") and name not in names)
    meant = {name: difflib.get_close_matches(name, names, 1, 0.8) for name in unknown}
    return [
        f"nf4_patch has no variable {name}{f'; did you mean {close[0]}?' if close else ''}"
        for name, close in meant.items()
    ]


def rank() -> str:
    """The number that a launcher (torchrun, accelerate) gave this process; "" where none started it."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""


def is_worker() -> bool:
    """Whether multiprocessing started this process (a DataLoader's worker, for example)."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.current_process().name != "MainProcess"


@dataclass(frozen=True)
class Config:
    requested: bool  # NF4_PATCH=1, or true, yes, on
    forbidden: str  # what ``keeps_off`` says
    strict: bool
    calibration: Path | None  # the file of measurements; None: not to be read
    calibration_named: bool  # by the user: it should exist
    options: Mapping[str, str | int]  # by the name in OPTIONS: "off", or what is asked for; a size in bytes

    def missing_calibration(self) -> str:
        """A sentence on a calibration file that the user named and that does not exist; "" where all is well."""
        if self.calibration is None or not self.calibration_named or self.calibration.exists():
            return ""
        return f"NF4_PATCH_CALIBRATION names {self.calibration}, which does not exist: the shipped tables decide"

    @classmethod
    def read(
        cls, environ: Mapping[str, str] | None = None, before: Config | None = None, **arguments: str | int | None
    ) -> Config:
        """The configuration from ``environ`` (os.environ by default). An option that is given as an argument, and not None, goes
        before its variable, and so do all options of the configuration ``before``.

        Raises:
            ConfigError: a variable or an argument has a value that is not allowed; the message lists the allowed ones.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            name, given = variable.argument, arguments.get(variable.argument)
            if given is None and before is not None and name in before.options:
                values[variable.name] = before.options[name]
                continue
            if given is None:
                name, given = variable.name, environ.get(variable.name, "")
            values[variable.name] = value_of(variable, name, given)
        folder = environ.get("XDG_CACHE_HOME") or "~/.cache"
        named = values["NF4_PATCH_CALIBRATION"]
        file = {"auto": f"{folder}/nf4_patch/calibration.json", "off": ""}.get(named, named)
        return cls(
            requested=SWITCH.get(values["NF4_PATCH"], False),
            forbidden=keeps_off(environ),
            strict=SWITCH[values["NF4_PATCH_STRICT"]],
            calibration=Path(os.path.expanduser(file)) if file else None,
            calibration_named=named not in ("auto", "off"),
            options={name: values[variable.name] for name, variable in OPTIONS.items()},
        )


def value_of(variable: Variable, name: str, given: Any) -> Any:
    """What ``given``, the value of an argument or variable called ``name``, means.

    Raises:
        ConfigError: it is not allowed.
    """
    try:
        text = str(given).strip()
    except ValueError:  # an int of more than 4,300 digits
        text = hex(given)
    value = text.lower() or variable.default
    shown = repr(given) if isinstance(given, str) else text
    shown = f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'}"
    if value in (*variable.allowed, variable.default):
        return value
    if variable.suffix and value.endswith(variable.suffix):
        return text
    try:
        size = size_of(value) if variable.size else None
    except ConfigError as error:
        raise ConfigError(f"{shown} {error}") from None
    if size is None:
        if variable.size and value == "block":
            raise ConfigError(
                f"{shown} is gone: a size serves more of a checkpointed step. For one block of a model give 2 bytes an "
                "element: 0.5GiB for an 8B model (218 M elements a block); or auto"
            )
        unset = "unset" if name == variable.name else "None"
        raise ConfigError(
            f"{shown} is not known; "
            f"allowed: {', '.join(variable.values).replace('`', '')}, or {unset}. {variable.meaning}"
        )
    return size or "off"
