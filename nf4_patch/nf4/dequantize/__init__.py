"""Dequantization of a packed weight, including its quantized scales, in one launch: kernel, reference and launch."""
