"""A training that goes on after the main thread's end, which it waits for; then come atexit handlers."""

from __future__ import annotations

import atexit
import threading

from training import train


def in_thread() -> None:
    threading.main_thread().join()
    train(3)
    print("trained")


atexit.register(print, "the end")
threading.Thread(target=in_thread).start()
