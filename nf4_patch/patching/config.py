"""Read the configuration from environment variables and from the arguments of ``enable``."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .option import FAST, OPTIONS, SWITCH, Variable
from .option import ConfigError as ConfigError

VARIABLES = (
    Variable(
        "NF4_PATCH", (*SWITCH, FAST), "",
        "1: turn the patch on without a change of code, when torch, bitsandbytes >= 0.46 or nf4_patch is imported. "
        "fast: also turn on every option that needs no decision, as `enable(\"fast\")` does. "
        "0: keep the patch off, even if the code calls `enable()`. Unset: the code decides.",
    ),
    Variable("NF4_USE_TRITON", (*SWITCH,), "1", "0: keep the patch off, as NF4_PATCH=0 does. Other projects use this name too."),
    Variable(
        "NF4_PATCH_STRICT", (*SWITCH,), "0",
        "1: raise an error if a 4-bit weight would fall back to the original function, if an option that you named does "
        "nothing, or if a cached weight differs from what its packed bytes decode to.",
        option=True,
    ),
    *OPTIONS.values(),
)  # fmt: skip


def options_set() -> list[str]:
    """Return "NAME=value" for each variable that sets an option to a value other than its default or "off"."""
    given = {v: os.environ.get(v.name, "").strip() for v in VARIABLES if v.option}
    asks = [v for v, text in given.items() if text.lower() not in ("", v.default) and SWITCH.get(text.lower(), True)]
    return [f"{v.name}={given[v]}" for v in asks]


def keeps_off(environ: Mapping[str, str] = os.environ) -> str:
    """Return the variables that keep the patch off, for example "NF4_PATCH=0", or ""."""
    given = {name: environ.get(name, "").strip() for name in ("NF4_PATCH", "NF4_USE_TRITON")}
    return " and ".join(f"{name}={text}" for name, text in given.items() if not SWITCH.get(text.lower(), True))


def unknown_variables() -> list[str]:
    """Return a message for each variable that begins with NF4_PATCH and is unknown."""
    names = [variable.name for variable in VARIABLES]
    unknown = sorted(name for name in os.environ if name.startswith("NF4_PATCH") and name not in names)
    meant = {name: difflib.get_close_matches(name, names, 1, 0.8) for name in unknown}
    return [
        f"nf4_patch has no variable {name}{f'; did you mean {close[0]}?' if close else ''}"
        for name, close in meant.items()
    ]


def rank() -> str:
    """Return the rank that a launcher gave this process, or ""."""
    return os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""


def is_worker() -> bool:
    """Return whether multiprocessing started this process, such as a DataLoader worker."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.current_process().name != "MainProcess"


@dataclass(frozen=True)
class Config:
    requested: bool  # NF4_PATCH=1, or true, yes, on, fast
    forbidden: str  # the result of ``keeps_off``
    strict: bool
    # The keys are those of OPTIONS. A value is "off", another allowed value such as "auto", or a size in bytes.
    options: Mapping[str, str | int]
    profile: str = ""  # "fast" or ""
    typed: frozenset[str] = frozenset()  # options that an argument or a variable set, even to "off"
    # options of the profile that stay off, with ``Option.lacks``
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, environ: Mapping[str, str] | None = None, before: Config | None = None, profile: str | None = None,
        **arguments: str | int | None,
    ) -> Config:  # fmt: skip
        """Return the configuration. ``before`` is the current one, or None if the patch is off.

        An option gets the value of its argument. Without an argument, it keeps its value in ``before`` or, without
        ``before``, gets the value of its variable. The ``profile``, by default the one in force, sets options that
        neither an argument nor a variable has set.

        Raises:
            ConfigError: a value is not allowed, or a typed option needs another release of a library.
        """
        environ = os.environ if environ is None else environ
        if forbidden := keeps_off(environ):
            # No other variable has an effect, so a wrong value does not matter.
            environ = {"NF4_PATCH": environ.get("NF4_PATCH", "")}
        switches = {v.name: v.parse(v.name, environ.get(v.name, "")) for v in VARIABLES if v.argument not in OPTIONS}
        requested = switches["NF4_PATCH"]
        if profile is not None:
            check_profile(profile)
        chosen = profile or (before.profile if before else requested if requested == FAST else "")
        values: dict[str, Any] = {}
        typed, lacking = set(before.typed if before else ()), {}
        for name, option in OPTIONS.items():
            where, given = name, arguments.get(name)
            if given is None and before is None:
                where, given = option.name, environ.get(option.name, "").strip() or None
            if given is not None:
                values[name] = option.parse(where, given)
                typed.add(name)
                if values[name] != "off" and (lacks := option.lacks()):
                    raise ConfigError(f"{where}={given!r} needs {' or '.join(lacks)}, which is not installed")
            elif before is not None and (name in typed or profile is None):
                values[name] = before.options[name]
                if name in before.lacking:
                    lacking[name] = before.lacking[name]
            else:
                values[name] = (option.fast if chosen else "") or "off"
                if values[name] != "off" and (lacks := option.lacks()):
                    values[name], lacking[name] = "off", lacks
        return cls(
            requested=SWITCH.get(requested, requested == FAST),
            forbidden=forbidden,
            strict=SWITCH[switches["NF4_PATCH_STRICT"]],
            options=values, profile=chosen, typed=frozenset(typed), lacking=lacking,
        )  # fmt: skip


def check_profile(profile: Any) -> None:
    """Raise a ConfigError that says what to type, unless ``profile`` is "fast"."""
    if profile == FAST:
        return
    meant = []
    for name, option in OPTIONS.items():
        with contextlib.suppress(ConfigError):
            if (value := option.parse(name, profile)) != "off" and type(profile) is not bool:
                meant.append(f"{name}={profile!r}" if isinstance(value, int) else f'{name}="{value}"')
    named = f", or name the option: {', '.join(f'enable({each})' for each in meant)}" if meant else ""
    raise ConfigError(f'enable({profile!r}) has no meaning. Type enable(), enable("{FAST}"){named}')
