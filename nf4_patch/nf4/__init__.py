"""The arithmetic of 4-bit weights: packed weights, code values, reference formulas, Triton kernels and their launches.

This package imports torch and triton, but none of the libraries that nf4_patch patches. It reads no environment
variable and no file.
"""
