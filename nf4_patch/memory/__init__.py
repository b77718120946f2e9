"""Spare memory: the GPU memory that training leaves free, and the parts of nf4_patch that share it.

* A *user* is such a part: the cache, kept activations, or resident copies of offloaded weights.
* Two training steps at the largest batch so far show how much memory training leaves free. The users share it, less a
  *margin*. A user's *budget* is its share on each GPU. Users with a lower *rank* get theirs first.
* To *give back* is to free the memory of all users, for example before a larger batch. They then wait for two more
  steps.
* A *batch* has rows, a sequence length and features. A training step is counted when the next forward pass begins.
"""
