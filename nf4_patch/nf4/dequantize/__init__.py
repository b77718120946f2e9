"""Dequantization of a packed weight, both levels in one launch: kernel, reference formula and launch path."""
