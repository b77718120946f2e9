"""What bitsandbytes loads as a backend. It is installed beside the package, as ``_nf4_patch_backend``: where the package is
missing, because an editable checkout was moved for example, ``import bitsandbytes`` works all the same.
"""


def load() -> None:
    """NF4_PATCH=1 enables; never raises."""
    try:
        from nf4_patch import _autoload
    except Exception:
        return
    _autoload()
