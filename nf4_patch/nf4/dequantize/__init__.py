"""Dequantization of a packed weight and of its scales in one launch: kernel, reference formula and launch path."""
