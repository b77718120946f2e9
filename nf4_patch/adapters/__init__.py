"""The replacements of a library's functions, a file a library; each function is a ``replace`` of a row of targets.py.
They stand above the options: some calls try an option first.

Plain functions and no wrapt objects: torch.compile bypasses or breaks on those. Each keeps its original and consults
the switch at every call, so that a replacement which another library has wrapped can still be turned off.
"""
