"""Locks that are free in a forked child process, where the thread that held them does not exist."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """Return an RLock that is released in a forked child.

    If another thread held the lock during the fork, the data that it protects may be inconsistent in the child.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in list(_locks):
        # A lock of the forking thread is left alone, because this thread lives on in the child and will release it.
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free)
