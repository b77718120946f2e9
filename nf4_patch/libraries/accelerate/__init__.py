"""What nf4_patch looks up in accelerate. Nothing is replaced there."""

from __future__ import annotations

from ...patching.targets import Library

LIBRARY = Library(modules={"hooks of placed modules": "accelerate.hooks"})
