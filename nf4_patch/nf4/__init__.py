"""The arithmetic of 4-bit weights: layout, reference, Triton kernels, launch, op.

This floor knows torch and triton. It has never heard of bitsandbytes, unsloth, wrapt or the environment.
"""
