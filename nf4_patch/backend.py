"""The entry points that bitsandbytes and PyTorch load as a backend, from the module ``_nf4_patch_backend``.

This file is installed outside the package, so that both can be imported even if nf4_patch cannot, for example after the
folder of an editable install was moved.
"""

import os


def load() -> None:
    try:
        from nf4_patch import _autoload
    except Exception:
        return
    _autoload()


def load_early() -> None:
    """Call ``load`` when PyTorch is imported, before transformers chooses a quantizer.

    For a checkpoint in MXFP4, a script that imports only transformers imports bitsandbytes after this choice.
    """
    if any(name.startswith("NF4_PATCH") for name in os.environ):
        load()
