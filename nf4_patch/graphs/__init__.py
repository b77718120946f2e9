"""The option ``graphs="auto"``: run decoder layers as CUDA graphs, so that the GPU does not wait for Python.

* To *record* a layer is to warm it up and to capture its work in CUDA graphs. The result is a *recording*.
* To *replay* a call is to copy its tensors into the *static buffers* (``Slot``), launch a graph, and copy the results
  out.
* A *key* describes a call without the contents of its tensors: the layouts of tensors, the plain arguments, the
  settings of PyTorch and nf4_patch and, in generation, the StaticCache. Recordings are stored by key and layer. Calls
  with equal keys have the same *shape*.
* All graphs of a GPU use one memory *pool*, so a graph's tensors are valid only until the next replay.
* *Kept activations* are the exception. They stay in a second pool until the backward, which then recomputes nothing.
* A *generation* in kept.py is a group of layers with kept activations, recorded one after another in one forward pass.
  Elsewhere, the word means the generation of text.
* A *fingerprint* records the Python state that a layer reads. If the state has changed, the layer runs eagerly until it
  is recorded again.
* A *refusal* says why a layer has no recording.
"""
