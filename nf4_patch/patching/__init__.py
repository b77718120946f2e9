"""The surgery: which functions of bitsandbytes and Unsloth are replaced, when, and what is refused.

The only floor that names foreign modules. It never sees a pointer or a grid.
"""
