"""The option ``cache``: keep dequantized weights, and return them to callers that only read them.

* An *entry* is the dense copy of one parameter's packed bytes. A weight is cached at its first read if there is room, and
  then stays cached. Every read checks the weight's tensors, their version counters and their memory.
* An entry's *location* is its key: the parameter, and the weight's place in it.
* The *budget* is the most bytes per device. With ``"auto"``, it is part of the spare memory (memory/).
* *Taken* memory is counted until nothing uses a dense copy, even if the entry was dropped. ``settle`` subtracts it then.
* A *pinned* weight is read by a CUDA graph, which may be replayed only while the entry is valid.
"""
