"""A child that is forked while its own thread or another one holds one of the locks continues and ends."""

import os
import signal
import threading
import time

import nf4_patch
from nf4_patch.patching import hooks
from nf4_patch.cache.store import cache

nf4_patch.enable(cache="1MiB")


def ends_well(child):
    """Return whether the child ends within some seconds, with exit code 0."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return False


def forked(work, held_by_itself=None):
    child = os.fork()
    if child:
        return ends_well(child)
    try:
        if held_by_itself is not None:
            held_by_itself.release()
        work()
        with ThreadThatUses(work):
            pass
        os._exit(0)
    finally:
        os._exit(1)


class ThreadThatUses:
    """Another thread of the child, which gets the lock too."""

    def __init__(self, work):
        self.thread = threading.Thread(target=work)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.thread.join()


USES = {
    "cache": (cache.lock, lambda: cache.configure("off")),
    "hooks": (hooks.lock, nf4_patch.disable),
}
for name, (lock, work) in USES.items():
    held = threading.Event()

    def hold(lock=lock, held=held):
        with lock:
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert forked(work), f"{name}, held by another thread"
    thread.join()
    lock.acquire()
    assert forked(work, lock), f"{name}, held by the thread that forks"
    lock.release()
    work()
print("forked")
