"""The environment: one table of variables, one frozen Config. Read by patching and tools, never by nf4."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .option import OPTIONS, SWITCH, Variable
from .option import ConfigError as ConfigError

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
    *OPTIONS.values(),
)  # fmt: skip


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
    options: Mapping[str, str | int]  # by the name in OPTIONS: "off", or what is asked for; a size in bytes

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
            values[variable.name] = variable.parse(name, given)
        return cls(
            requested=SWITCH.get(values["NF4_PATCH"], False),
            forbidden=keeps_off(environ),
            strict=SWITCH[values["NF4_PATCH_STRICT"]],
            options={name: values[variable.name] for name, variable in OPTIONS.items()},
        )
