"""What replaces a library's function: it tries, counts, and falls back with untouched arguments.

An adapter gives ``attempt``, which returns the result or the Reason why the original has to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..nf4.runtime import KernelUnavailable, is_out_of_memory
from .context import is_compiling, keep_dynamo_out
from .counters import counters, logger
from .reasons import Reason
from .switch import Gate, switch

Function = Callable[..., Any]
T = TypeVar("T")


class CallersError(Exception):
    """Raised by ``attempt`` from an error that is the caller's own, and not ours: that one is raised as it is."""


class Fallbacks:
    """Why the calls of one target ran the original: named, counted, and the latest failures in full."""

    def __init__(self, target: str):
        self.target = target
        self.details: dict[Reason, str] = {}

    def unavailable(self, error: KernelUnavailable) -> Reason:
        reason = Reason[error.reason]
        if reason is Reason.KERNEL_FAILED:
            self.details[reason] = str(error)
        return reason

    def failed(self, error: Exception) -> Reason:
        """Our own error never stops a training that would have worked: logged, named, counted."""
        if isinstance(error, CallersError) and error.__cause__ is not None:
            raise error.__cause__ from None
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            return Reason.ARGUMENTS  # raised by the call itself: the original says what is wrong with the arguments
        if switch.strict or is_out_of_memory(error):
            raise error
        message = self.details[Reason.INTERNAL_ERROR] = f"{type(error).__name__}: {error}"
        if message not in counters.errors:  # a step makes hundreds of calls: one traceback is enough
            logger.error("nf4_patch failed in %s; the original runs", self.target, exc_info=error)
        return Reason.INTERNAL_ERROR

    def count(self, reason: Reason) -> None:
        counters.fall_back(self.target, reason, switch.strict, self.details.get(reason, ""))

    def attempt(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | Reason:
        """The function's result, or the Reason why there is none, counted."""
        result: T | Reason
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            result = self.failed(error)
        if type(result) is Reason:
            self.count(result)
        return result


keep_dynamo_out(Fallbacks.attempt)


def around(function: Function) -> Function:
    """A maker of replacements, for a row to name: ``function(original, *arguments)`` while its option is on. Nothing is counted."""

    def make(target: Any, original: Function) -> Function:
        gate = switch.gates[target.only]

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs) if gate.on or target.stays else original(*args, **kwargs)

        return replacement

    return make


def tried_first(
    original: Function, fallbacks: Fallbacks, attempt: Function, trace: Function | None = None, gate: Gate = switch
) -> Function:
    """The original, with ``attempt`` tried first.

    Args:
        attempt: takes the original's arguments; its result, or the Reason why the original runs. What it raises is taken
            for an error of ours, but for a CallersError.
        trace: the same, written to be traced by Dynamo, where nothing can be caught or counted. None: what is traced
            stays the original's.
        gate: tried only while this is on.
    """
    failed, count = fallbacks.failed, fallbacks.count
    keep_dynamo_out(attempt)

    @functools.wraps(original)
    def traceable(*args: Any, **kwargs: Any) -> Any:
        if gate.on:
            if is_compiling():
                result = trace(*args, **kwargs)  # type: ignore[misc]
            else:
                try:  # without ``**kwargs`` where there are none: 0.1 us less (2-core CPU machine, Python 3.11)
                    result = attempt(*args, **kwargs) if kwargs else attempt(*args)
                except Exception as error:
                    result = failed(error)
                if type(result) is Reason:
                    count(result)
            if type(result) is not Reason:
                return result
        return original(*args, **kwargs)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if gate.on and not is_compiling():
            result = fallbacks.attempt(attempt, *args, **kwargs)
            if type(result) is not Reason:
                return result
        return original(*args, **kwargs)

    if trace is not None:
        return traceable
    # The body of an op: where a dispatch mode calls it, Dynamo would compile it as a function of its own.
    keep_dynamo_out(replacement)
    return replacement
