"""The module of accelerate that nf4_patch reads. No function of accelerate is replaced."""

from __future__ import annotations

from ...patching.targets import Library

LIBRARY = Library(modules={"hooks of placed modules": "accelerate.hooks"})
