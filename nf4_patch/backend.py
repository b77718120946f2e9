"""The entry point that bitsandbytes loads as a backend.

This file is installed beside the package, as ``_nf4_patch_backend``. So ``import bitsandbytes`` works even if the package is
missing, for example because an editable checkout was moved.
"""


def load() -> None:
    """Enable the patch if NF4_PATCH=1. Never raise."""
    try:
        from nf4_patch import _autoload
    except Exception:
        return
    _autoload()
