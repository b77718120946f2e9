"""The patch on or off inside a block: how every tool and benchmark switches it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import nf4_patch

from ..config import Config
from ..patching import hooks
from .report import NotAvailable


@contextlib.contextmanager
def patch(on: bool, **options: Any) -> Iterator[None]:
    """The patch on, with these options of ``nf4_patch.enable``, or off; afterwards as it was before.

    Off, bitsandbytes is as it comes, also where NF4_PATCH=1 patches it on its import: nothing is compared with itself.
    """
    import bitsandbytes.functional  # noqa: F401

    with nf4_patch.enabled(**options) if on else hooks.suspended():
        yield


def require_patch() -> None:
    """
    Raises:
        NotAvailable: a variable keeps the patch off, so that it cannot be measured.
    """
    if Config.read().forbidden:
        raise NotAvailable("NF4_PATCH=0 or NF4_USE_TRITON=0 keeps the patch off: unset it to measure the patch")
