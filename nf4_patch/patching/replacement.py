"""What replaces a library's function: it tries, counts, and falls back with untouched arguments.

There is one form of replacement. An adapter gives it ``attempt``, which returns the result, the Reason why the original has to
run, or a call that is made where nothing is caught.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..nf4.runtime import KernelUnavailable, is_out_of_memory
from .context import is_compiling, keep_dynamo_out
from .counters import counters, logger
from .reasons import WRONG_IN_THE_ORIGINAL, Reason
from .switch import switch

Function = Callable[..., Any]
T = TypeVar("T")
gates = switch.gates


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

    def refuse(self, reason: Reason) -> NoReturn:
        """Count a reason for which the original would compute wrong numbers.

        Raises:
            ValueError: always.
        """
        counters.fallbacks[self.target, reason] += 1
        raise ValueError(f"{self.target}: {reason.sentence} ({reason.name}); {reason.advice}")

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


def replacement_of(
    target: Any, original: Function, fallbacks: Fallbacks, attempt: Function, traced: Function | None = None,
    is_body: bool = False, refuses: bool = False,
) -> Function:  # fmt: skip
    """The original, with ``attempt`` tried first while the option of the row ``target`` is on.

    Args:
        attempt: takes the original's arguments and returns its result, or the Reason why the original runs. What it raises is
            taken for an error of ours. A tuple is a function and its arguments: called, and what that raises is the caller's.
        traced: the same where Dynamo traces, and nothing can be caught or counted. None: what is traced stays the original's.
        is_body: of an op, or of what calls one: Dynamo would compile it as a function of its own.
        refuses: the original is wrong for the reasons WRONG_IN_THE_ORIGINAL, so that they raise a ValueError.
    """
    option = "always" if target.permanent else target.option
    other = target.or_option or option

    def refused(why: Exception | Reason) -> None:
        if refuses and isinstance(why, Reason) and why in WRONG_IN_THE_ORIGINAL:
            fallbacks.refuse(why)
        fallbacks.count(why if isinstance(why, Reason) else fallbacks.failed(why))

    # Its closure holds functions and strings: PyTorch 2.8's Dynamo breaks the graph at an autograd function's that holds objects.
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if traced is not None and (gates[option].on or gates[other].on):
                result = traced(*args, **kwargs)
                if type(result) is not Reason:
                    return result
        elif gates[option].on or gates[other].on:
            try:  # without ``**kwargs`` where there are none: 0.1 us less (2-core CPU machine, Python 3.11)
                result = attempt(*args, **kwargs) if kwargs else attempt(*args)
            except Exception as error:
                refused(error)
            else:
                kind = type(result)
                if kind is not Reason:
                    return result[0](*result[1:]) if kind is tuple else result
                refused(result)
        return original(*args, **kwargs)

    # Dynamo remembers what it compiled by the code, and gives up after eight: each has its own.
    made: Any = replacement
    made.__code__ = made.__code__.replace()
    for each in (attempt, made) if is_body else (attempt,):
        keep_dynamo_out(each)
    return replacement


def instead(function: Function) -> Function:
    """As an ``attempt``: nothing is caught or counted."""
    return lambda *args, **kwargs: (functools.partial(function, *args, **kwargs),)


def around(function: Function) -> Function:
    """A maker of replacements, for a row to name: ``function(original, *arguments)`` while its option is on."""

    def make(target: Any, original: Function) -> Function:
        return replacement_of(target, original, Fallbacks(target.name), instead(functools.partial(function, original)))

    return make
