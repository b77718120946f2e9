"""Fused matmul, which multiplies straight from the packed weight."""
