"""Matmul straight from the packed weight."""
