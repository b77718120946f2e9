"""What a script can ask of its surroundings, also when its main thread has ended; two empty modules are in its folder."""

import atexit
import inspect
import os
import pickle
import sys
import threading

import neighbour

print(__name__, __file__, __spec__ and __spec__.name, type(__loader__).__name__, __builtins__, sys.argv, sys.path[0])


class Pickled:
    pass


def late(when):
    os.chdir("/")
    import late_neighbour

    pickle.dumps(Pickled)
    print(when, inspect.getsource(late)[:8], sys.modules["__main__"].late is late, sys.argv, sys.path[0], flush=True)


def in_thread():
    threading.main_thread().join()
    late("thread")


threading.Thread(target=in_thread).start()
atexit.register(late, "atexit")
