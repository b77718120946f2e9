"""Threads that start at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(*functions: Callable[[], object]) -> None:
    """Run all functions at the same time. Raise the first exception of any of them."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(functions))

    def guarded(function: Callable[[], object]) -> None:
        barrier.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
