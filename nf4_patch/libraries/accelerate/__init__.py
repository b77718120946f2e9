"""Name the module of accelerate whose hooks nf4_patch recognizes. No function of accelerate is replaced."""

from __future__ import annotations

from ...patching.targets import Library

LIBRARY = Library(modules={"hooks of placed modules": "accelerate.hooks"})
