"""Packed weights in host memory, with prefetch to the GPU."""
