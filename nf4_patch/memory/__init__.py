"""Spare memory: the GPU memory that training leaves free, and the parts of nf4_patch that share it.

* A *user* is such a part: the cache, kept activations, or resident copies of offloaded weights.
* The *budget* is what one user may take on each GPU: the memory that two training steps at the largest batch so far left
  free, less a *margin*. Users get it in the order of their *rank*.
* To *give back* is to free the memory of all users, for example before a larger batch. They then wait for two more steps.
* A *batch* has rows, a sequence length and features. A training step is counted when the next forward pass begins.
"""
