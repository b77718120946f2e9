"""Spare memory: the GPU memory that training leaves free, and the parts of nf4_patch that share it."""
