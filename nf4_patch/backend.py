"""The entry point that bitsandbytes loads as a backend.

This file is installed outside the package nf4_patch, as the module ``_nf4_patch_backend``. So ``import bitsandbytes``
works even if nf4_patch cannot be imported, for example because the folder of an editable install was moved.
"""


def load() -> None:
    """Enable the patch if NF4_PATCH=1. Never raise."""
    try:
        from nf4_patch import _autoload
    except Exception:
        return
    _autoload()
