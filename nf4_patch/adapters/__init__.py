"""Adapters between library functions and the kernel, one module per library. Rows of targets.py name them in ``replace``.

Adapters may import options, because some calls try an option first. Replacements are plain functions, because torch.compile
bypasses wrapt objects or breaks the graph at them. Each replacement reads the switch at every call. So it can be turned off
even after another library has wrapped it.
"""
