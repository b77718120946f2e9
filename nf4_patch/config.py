"""The environment: one table of variables, one frozen Config. Read by patching and tools, never by nf4."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
    size: bool = False  # a number of bytes is allowed too

    @property
    def values(self) -> tuple[str, ...]:
        """What may be given, in words."""
        more = [f"a path to a `{self.suffix}`"] if self.suffix else []
        more += ["a size in bytes or with a unit (`6GiB`, `500MB`)"] if self.size else []
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
    ),
    Variable(
        "NF4_PATCH_MATMUL", ("off", "auto"), "off",
        "auto: multiply few rows (generation, short sequences) straight from the packed weight where measured to win. "
        "Off by default: as accurate, but not the same bits as the original.",
    ),
    Variable(
        "NF4_PATCH_DEFER", ("auto", "never", "always"), "auto",
        "Whether a library's own fused kernel (Unsloth >= 2026.10, axolotl) keeps its calls. auto: unless ours is measured "
        "to be at least as fast; never: ours takes them; always: it keeps them all.",
    ),
    Variable(
        "NF4_PATCH_CALIBRATION", ("auto", "off"), "auto",
        "The file of `nf4-patch calibrate`, which takes precedence over the shipped tables of what is measured to win. "
        "auto: nf4_patch/calibration.json in $XDG_CACHE_HOME or ~/.cache; off: the shipped tables only.",
        suffix=".json",
    ),
    Variable(
        "NF4_PATCH_CACHE", ("off", "block"), "off",
        "Keep dequantized weights for the functions that only read them, with the same bits. block: from the recompute "
        "of a checkpointed block to its backward; a size: as many as fit into that much memory of every GPU.",
        size=True,
    ),
)  # fmt: skip

UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}


def size_of(text: str) -> int | None:
    """The bytes of "1500000", "500MB" or "6.5 GiB"; None where it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class Config:
    requested: bool  # NF4_PATCH=1, or true, yes, on
    forbidden: bool  # NF4_PATCH=0 or NF4_USE_TRITON=0, or false, no, off
    strict: bool
    defer: str  # auto, never, always
    matmul: str  # off, auto
    calibration: Path | None  # the file of measurements; None: not to be read
    calibration_named: bool  # by the user: it should exist
    cache: str | int  # off, block, or bytes a GPU

    def missing_calibration(self) -> str:
        """A sentence on a calibration file that the user named and that does not exist; "" where all is well."""
        if self.calibration is None or not self.calibration_named or self.calibration.exists():
            return ""
        return f"NF4_PATCH_CALIBRATION names {self.calibration}, which does not exist: the shipped tables decide"

    @classmethod
    def read(
        cls, environ: Mapping[str, str] | None = None, matmul: str | None = None, cache: str | int | None = None
    ) -> Config:
        """The configuration from ``environ`` (os.environ by default); what else is given wins over its variable.

        Raises:
            ConfigError: a variable or an argument has a value that is not allowed; the message lists the allowed ones.
        """
        environ = dict(os.environ if environ is None else environ)
        if matmul is not None:
            if not isinstance(matmul, str):
                raise ConfigError(f'matmul={matmul!r} is not known; allowed: "off", "auto" or None')
            environ["NF4_PATCH_MATMUL"] = matmul
        if cache is not None:
            environ["NF4_PATCH_CACHE"] = str(cache)
        values = {}
        for variable in VARIABLES:
            given = environ.get(variable.name, "").strip()
            value = given.lower() or variable.default
            if variable.suffix and value.endswith(variable.suffix):
                value = given
            elif variable.size and size_of(value):
                pass
            elif value not in (*variable.allowed, variable.default):
                raise ConfigError(
                    f"{variable.name}={environ[variable.name]!r} is not known; "
                    f"allowed: {', '.join(variable.values).replace('`', '')}, or unset. {variable.meaning}"
                )
            values[variable.name] = value
        folder = environ.get("XDG_CACHE_HOME") or "~/.cache"
        named = values["NF4_PATCH_CALIBRATION"]
        file = {"auto": f"{folder}/nf4_patch/calibration.json", "off": ""}.get(named, named)
        return cls(
            requested=SWITCH.get(values["NF4_PATCH"], False),
            forbidden=not (SWITCH.get(values["NF4_PATCH"], True) and SWITCH[values["NF4_USE_TRITON"]]),
            strict=SWITCH[values["NF4_PATCH_STRICT"]],
            defer=values["NF4_PATCH_DEFER"],
            matmul=values["NF4_PATCH_MATMUL"],
            calibration=Path(os.path.expanduser(file)) if file else None,
            calibration_named=named not in ("auto", "off"),
            cache=size_of(values["NF4_PATCH_CACHE"]) or values["NF4_PATCH_CACHE"],
        )
