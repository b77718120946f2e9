"""Which functions of bitsandbytes and Unsloth are replaced, when, and which calls run the original.

The only floor that names foreign modules, and the only one that reads a user's calibration.
"""
