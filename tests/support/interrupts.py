"""Interrupt a function in the middle, with another thread's work or with Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType


def lines_of(code: CodeType) -> list[int]:
    """Return the lines of a function, except the line of its ``def``."""
    return sorted({line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno})


@contextlib.contextmanager
def at_line(code: CodeType, line: int, act: Callable[[], object], reached: list[int]) -> Iterator[None]:
    """Call ``act`` before this line runs, in this thread."""

    def trace(frame, event, arg):
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            reached.append(line)
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_at_every_line(
    call: Callable[[], object], *functions: object, before: Callable[[], object] = lambda: None
) -> Iterator[str]:
    """Interrupt ``call`` once at each line of the functions that it reaches. ``before`` runs before each call. Yield the place."""
    for function in functions:
        code = getattr(function, "__code__", function)
        for line in lines_of(code):
            before()
            reached: list[int] = []

            def interrupt(reached=reached):
                if len(reached) == 1:  # and no second time, in what cleans up
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt), at_line(code, line, interrupt, reached):
                call()
            if reached:
                yield f"{code.co_name}:{line}"
