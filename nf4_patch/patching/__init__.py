"""Which functions of bitsandbytes and Unsloth are replaced, when, and which calls run the original.

The only floor that names foreign modules. It never sees a pointer or a grid.
"""
