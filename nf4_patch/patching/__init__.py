"""How functions of other libraries are replaced, when, and which calls run the original. It imports no option.

The only floor beside the options that names foreign modules.
"""
