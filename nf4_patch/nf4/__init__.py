"""The arithmetic of 4-bit weights: packed weights, codes, reference formulas, Triton kernels and launches.

This package imports torch and triton, but none of the patched libraries. It reads no environment variable and no file.
"""
