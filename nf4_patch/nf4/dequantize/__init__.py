"""Dequantize a packed weight, including its quantized scales, with a single kernel launch."""
