"""Packed weights in host memory, with prefetch to the GPU.

* A *host block* is pinned host memory with the packed weights of one decoder layer, which are copied as a whole.
* A *buffer* is GPU memory for a copy of one block. Each GPU has two *prefetch buffers*, which take turns.
* A *fetch* is a copy of a block to the GPU, on a separate CUDA stream. A *prefetch* begins while an earlier layer
  computes, a *late* fetch only when the layer is read.
* A *resident copy* is a further buffer, in spare memory, with ``offload="auto"``. It keeps its copy between reads. The
  weights themselves stay in host memory, so the copy can be freed at any time.
"""
