"""Packed experts that wait in host memory, and are fetched ahead."""
