"""The patch on or off inside a block: how every tool and benchmark switches it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import nf4_patch

from ..patching import hooks


@contextlib.contextmanager
def patch(on: bool, **options: Any) -> Iterator[None]:
    """The patch on, with these options of ``nf4_patch.enable``, or off; afterwards as it was before.

    Off, bitsandbytes is as it comes, also where NF4_PATCH=1 patches it on its import: nothing is compared with itself.
    """
    import bitsandbytes.functional  # noqa: F401

    if on:
        with nf4_patch.enabled(**options):
            yield
        return
    was_on, options_before = hooks.in_force()
    nf4_patch.disable()
    try:
        yield
    finally:
        if was_on:
            nf4_patch.enable(*options_before)
