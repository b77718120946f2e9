"""Packed experts in host memory, with prefetch to the GPU."""
