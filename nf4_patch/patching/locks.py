"""Locks that a forked child finds free: no thread lives on in it that could release one."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """An RLock. What it guards may be half changed in a child that was forked while another thread held it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # by the thread that forked, which will release it
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free)
