"""Read the configuration from environment variables and from the arguments of ``enable``."""

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
        "1: turn the patch on without a change of code, when bitsandbytes >= 0.46 or nf4_patch is imported. "
        "0: keep the patch off, even if the code calls `enable()`. Unset: the code decides.",
    ),
    Variable("NF4_USE_TRITON", (*SWITCH,), "1", "0: keep the patch off, as NF4_PATCH=0 does. Other projects use this name too."),
    Variable(
        "NF4_PATCH_STRICT", (*SWITCH,), "0",
        "1: raise an error if a 4-bit weight would fall back to the original function, "
        "or if a cached weight differs from what its packed bytes decode to.",
        option=True,
    ),
    *OPTIONS.values(),
)  # fmt: skip


def options_set() -> list[str]:
    """Return "NAME=value" for each option that an environment variable switches on.

    A variable that is set to the option's default or to "off" is left out.
    """
    given = {v: os.environ.get(v.name, "").strip() for v in VARIABLES if v.option}
    asks = [v for v, text in given.items() if text.lower() not in ("", v.default) and SWITCH.get(text.lower(), True)]
    return [f"{v.name}={given[v]}" for v in asks]


def keeps_off(environ: Mapping[str, str] = os.environ) -> str:
    """Return the variables that keep the patch off, for example "NF4_PATCH=0". Return "" if no variable does."""
    given = {name: environ.get(name, "").strip() for name in ("NF4_PATCH", "NF4_USE_TRITON")}
    return " and ".join(f"{name}={text}" for name, text in given.items() if not SWITCH.get(text.lower(), True))


def unknown_variables() -> list[str]:
    """Return a message for each environment variable NF4_PATCH_* that nf4_patch does not know."""
    names = [variable.name for variable in VARIABLES]
    unknown = sorted(name for name in os.environ if name.startswith("NF4_PATCH") and name not in names)
    meant = {name: difflib.get_close_matches(name, names, 1, 0.8) for name in unknown}
    return [
        f"nf4_patch has no variable {name}{f'; did you mean {close[0]}?' if close else ''}"
        for name, close in meant.items()
    ]


def rank() -> str:
    """Return the rank that torchrun or accelerate gave this process, or "" if no launcher started it."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""


def is_worker() -> bool:
    """Return whether multiprocessing started this process. DataLoader workers are such processes."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.current_process().name != "MainProcess"


@dataclass(frozen=True)
class Config:
    """The values of all variables and options."""

    requested: bool  # NF4_PATCH=1, or true, yes, on
    forbidden: str  # the result of ``keeps_off``
    strict: bool
    # The keys are those of OPTIONS. A value is "off", another allowed value such as "auto", or a size in bytes.
    options: Mapping[str, str | int]

    @classmethod
    def read(
        cls, environ: Mapping[str, str] | None = None, before: Config | None = None, **arguments: str | int | None
    ) -> Config:
        """Return the configuration.

        If ``arguments`` has a value for an option, this value applies. Otherwise the option keeps its value in
        ``before``. If there is no ``before``, the option's environment variable applies.

        Args:
            environ: the environment variables, ``os.environ`` by default.
            before: the current configuration, or None if the patch is off.
            arguments: the values of options, by the option's name. None means that no value is given.

        Raises:
            ConfigError: a variable or an argument has a value that is not allowed. The message lists the allowed values.
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
