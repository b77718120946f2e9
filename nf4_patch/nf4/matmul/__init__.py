"""Matmul straight from the packed weight: tables, kernels and launches, for few rows."""
