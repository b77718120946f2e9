"""The entry points that bitsandbytes and PyTorch load as a backend, from the module ``_nf4_patch_backend``.

This file is installed outside the package, so that bitsandbytes and PyTorch can be imported even if nf4_patch cannot,
for example after the folder of an editable install was moved.
"""

import os


def load() -> None:
    """Enable the patch if NF4_PATCH=1 or NF4_PATCH=fast. Never raise."""
    try:
        from nf4_patch import _autoload
    except Exception:
        return
    _autoload()


def load_early() -> None:
    """Call ``load`` when PyTorch is imported, if an environment variable of nf4_patch is set.

    For a checkpoint in MXFP4, ``load`` must run before transformers chooses the model's quantizer. A script that
    imports only transformers imports bitsandbytes after this choice.
    """
    if any(name.startswith("NF4_PATCH") for name in os.environ):
        load()
