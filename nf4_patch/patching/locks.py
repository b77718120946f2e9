"""Locks that are free in a forked child process, and a mark of the ``with`` block that a thread runs.

The child has only the thread that forked, so no thread could release a lock that another thread held.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """Return an RLock that is free in a forked child, even if another thread held it during the fork.

    The data that it protects might then be inconsistent in the child.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class Running:
    """Marks a ``with`` block of ``Block``. It is freed together with the block's frame."""


class Block(threading.local):
    """Tells whether this thread runs a certain ``with`` block.

    An interrupt of the block's cleanup does not leave ``on`` True.
    """

    by: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to the running block

    @property
    def on(self) -> bool:
        return self.by() is not None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        running, before = Running(), self.by
        self.by = weakref.ref(running)
        try:
            yield
        finally:
            self.by = before


def _free() -> None:
    for lock in list(_locks):
        # The forking thread continues in the child, so it will release the locks that it holds.
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free)
