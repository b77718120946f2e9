"""The version, below everything that names it."""

__version__ = "0.1.0"
