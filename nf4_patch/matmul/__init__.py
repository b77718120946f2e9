"""The fused matmul, which multiplies by a packed 4-bit weight without a dequantized copy of the weight."""
