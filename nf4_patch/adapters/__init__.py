"""Adapters between library functions and the kernel, one module per library.

For each library function, a row of targets.py names its adapter in the field ``replace``. Adapters may import the
modules of options, because some calls try an option first, for example the weight cache or the fused matmul.

Replacements are plain functions, because torch.compile bypasses wrapt objects or breaks the graph at them. Each
replacement checks at every call whether the patch is on. So a replacement can be turned off even after another library
has wrapped it.
"""
