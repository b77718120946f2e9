"""The option ``cache``: keep dequantized weights, and return them to callers that only read them.

* An *entry* is the dense copy of a packed weight. The weight is a parameter or a part of one. It is cached at its first
  read if there is room, and then stays cached. Every read checks the weight's tensors, their version counters and their
  memory.
* An entry's *location* is its key: the parameter, the weight's place in it, and the dtype.
* The *budget* is the most bytes per device. With ``"auto"``, it is part of the spare memory (memory/).
* *Taken* memory is that of the dense copies. A dropped copy is counted until nothing uses it. ``settle`` then subtracts
  its size.
* A *pinned* weight is one whose dense copy a CUDA graph reads. The graph may be replayed only while the entry is valid.
"""
