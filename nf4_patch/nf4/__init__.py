"""The arithmetic of 4-bit weights: the packed weight, codes, references, Triton kernels and their launches.

It imports torch and triton, and none of the patched libraries; it reads neither the environment nor a file.
"""
