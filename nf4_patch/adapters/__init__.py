"""Adapters between library functions and the kernel, one module per library.

An adapter passes the arguments of a library function to the kernel. A row of targets.py names each patched function
and its adapter (field ``replace``). Adapters may import the modules of options, because some calls try an option before
the kernel, for example the weight cache or the fused matmul.

A library function is replaced by a plain function. A wrapt object would not do, because torch.compile bypasses it or
breaks the graph at it. Each replacement checks at every call whether the patch is on. So ``disable`` also works after
another library has wrapped the replacement.
"""
