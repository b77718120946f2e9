"""Make the replacements of library functions.

A replacement first tries code of nf4_patch, its ``attempt``. If this fails or returns a Reason, the original runs with
the caller's own arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..nf4.runtime import KernelUnavailable, is_out_of_memory
from . import effects
from .context import is_compiling, keep_dynamo_out
from .counters import counters, logger, warn_once
from .originals import replaced
from .reasons import WRONG_IN_THE_ORIGINAL, Reason
from .switch import switch

Function = Callable[..., Any]
T = TypeVar("T")
gates = switch.gates


class Fallbacks:
    """The fallbacks of one target. ``details`` holds the latest error message for each Reason."""

    def __init__(self, target: str):
        self.target = target
        self.details: dict[Reason, str] = {}

    def unavailable(self, error: KernelUnavailable) -> Reason:
        reason = Reason[error.reason]
        if reason is Reason.KERNEL_FAILED:
            self.details[reason] = str(error)
        return reason

    def failed(self, error: Exception) -> Reason:
        """Log an error in nf4_patch's code and return its Reason, so that training continues with the original.

        Raises:
            Exception: ``error`` itself, in strict mode or if it is an out-of-memory error.
        """
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            return Reason.ARGUMENTS  # the caller's arguments are wrong, and the original raises a clearer error
        if switch.strict or is_out_of_memory(error):
            raise error
        message = self.details[Reason.INTERNAL_ERROR] = f"{type(error).__name__}: {error}"
        if message not in counters.errors:  # log only one traceback, because a step makes hundreds of calls
            logger.error("nf4_patch failed in %s; the original runs", self.target, exc_info=error)
        return Reason.INTERNAL_ERROR

    def count(self, reason: Reason) -> None:
        counters.fall_back(self.target, reason, switch.strict, self.details.get(reason, ""))
        effects.refused(self.target, reason)

    def refuse(self, reason: Reason) -> NoReturn:
        """Count a fallback, and raise a ValueError, because the original would compute wrong numbers."""
        counters.fallbacks[self.target, reason] += 1
        raise ValueError(f"{self.target}: {reason.sentence} ({reason.name}); {reason.advice}")

    def attempt(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | Reason:
        """Call ``function``. If it fails or returns a Reason, count and return a Reason."""
        result: T | Reason
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            result = self.failed(error)
        if type(result) is Reason:
            self.count(result)
        return result


keep_dynamo_out(Fallbacks.attempt)


def replacement_of(
    target: Any, original: Function, fallbacks: Fallbacks, attempt: Function, traced: Function | None = None,
    is_body: bool = False, refuses: bool = False,
) -> Function:  # fmt: skip
    """Return a replacement that tries ``attempt`` while the target's option is on, and otherwise calls the original.

    Args:
        attempt: takes the original's arguments. It returns the result, or the Reason why the original has to run. After an
            error, which is logged, the original runs too. ``attempt`` may also return (function, *arguments), a call whose
            errors reach the caller.
        traced: called instead of ``attempt`` while Dynamo traces. Its errors are not caught, and nothing is counted.
            None means that Dynamo traces the original.
        is_body: True if the original is the body of an op, or calls one. Dynamo must then not compile the replacement,
            because it would compile the original as a separate graph.
        refuses: if True, raise a ValueError for the Reasons in WRONG_IN_THE_ORIGINAL instead of running the original.
    """
    option, other = target.option, target.or_option or target.option
    if name := replaced(target, original):
        attempt, traced = leaves(name), None

    def refused(why: Exception | Reason) -> None:
        if refuses and isinstance(why, Reason) and why in WRONG_IN_THE_ORIGINAL:
            fallbacks.refuse(why)
        fallbacks.count(why if isinstance(why, Reason) else fallbacks.failed(why))

    # The closure of ``replacement`` may hold only functions and strings. With any other object, PyTorch 2.8's Dynamo
    # would break the graph.
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if traced is not None and (gates[option].on or gates[other].on):
                result = traced(*args, **kwargs)
                if type(result) is not Reason:
                    return result
        elif gates[option].on or gates[other].on:
            try:  # omitting an empty ``**kwargs`` saves 0.1 us (2-core CPU machine, Python 3.11)
                result = attempt(*args, **kwargs) if kwargs else attempt(*args)
            except Exception as error:
                refused(error)
            else:
                kind = type(result)
                if kind is not Reason:
                    return result[0](*result[1:]) if kind is tuple else result
                refused(result)
        return original(*args, **kwargs)

    # Dynamo caches per code object and stops after eight compilations, so each replacement gets its own code object.
    made: Any = replacement
    made.__code__ = made.__code__.replace()
    for each in (attempt, made) if is_body else (attempt,):
        keep_dynamo_out(each)
    return replacement


def leaves(name: str) -> Function:
    """Return an ``attempt`` that leaves each call to the original, because somebody replaced ``name``."""

    def attempt(*args: Any, **kwargs: Any) -> Reason:
        warn_once(
            f"nf4_patch: {name} was replaced before enable(), and the function in its place runs. To speed it up, call enable() "
            "first, or take the other function out"
        )
        return Reason.REPLACED

    return attempt


def instead(function: Function) -> Function:
    """Return an ``attempt`` that calls ``function``. Its errors reach the caller, and its calls are not counted."""
    return lambda *args, **kwargs: (functools.partial(function, *args, **kwargs),)


def around(function: Function) -> Function:
    """Return a factory for the field ``replace`` of a ``Target``. Its replacement calls ``function(original, *arguments)``."""

    def make(target: Any, original: Function) -> Function:
        return replacement_of(target, original, Fallbacks(target.name), instead(functools.partial(function, original)))

    return make
