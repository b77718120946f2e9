#!/usr/bin/env python
"""Build a repository for Hugging Face's `kernels` that holds only the dequantization, without the patch.

    python scripts/hub_kernel.py build/hub

`kernels` gives every loaded kernel a new module name, so the copied modules may only use relative imports. They need
torch and Triton, but not bitsandbytes, because they read the fields of a QuantState.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import nf4_patch.libraries  # noqa: F401  # fills MODULES
from nf4_patch.patching.targets import MODULES as LOOKED_UP

ROOT = Path(__file__).resolve().parents[1]
NAME, VERSION = "nf4-dequantize", 1
# The modules that the kernel needs: the arithmetic, and the guards with the sentences of their reasons.
MODULES = (
    "nf4/__init__.py", "nf4/codes.py", "nf4/runtime.py", "nf4/weight.py", "nf4/dequantize/*.py",
    "patching/__init__.py", "patching/context.py", "patching/guards.py", "patching/quant_state.py", "patching/reasons.py",
)  # fmt: skip
INIT = '''"""Dequantize bitsandbytes' 4-bit weights on NVIDIA GPUs (Tesla T4 or newer), with bit-identical results."""

import torch

from .nf4.dequantize import launch
from .patching.guards import describe, why_not
from .patching.quant_state import weight_of
from .patching.reasons import Reason

__all__ = ["dequantize_4bit"]


@torch.compiler.disable
def dequantize_4bit(packed, quant_state, out=None):
    """Dequantize a weight that bitsandbytes packed in 4 bits.

    Args:
        packed: the packed weight on a CUDA GPU, for example ``layer.weight``.
        quant_state: its ``bitsandbytes.functional.QuantState``, for example ``layer.weight.quant_state``.
        out: a contiguous tensor to fill, of the QuantState's shape and dtype. By default a new tensor is returned.

    Returns:
        The dense weight, transposed if the packed bytes are [1, bytes], as bitsandbytes does.

    Raises:
        ValueError: the kernel does not support this weight or ``out``. The message says what was found.
    """
    weight = weight_of(packed, quant_state)
    if isinstance(weight, Reason):
        raise ValueError(f"{weight.sentence} ({weight.name})")
    reason = Reason.REQUIRES_GRAD if packed.requires_grad else why_not(weight, out)
    if reason is not None:
        raise ValueError(f"{reason.sentence} ({reason.name}): {describe(weight)}")
    result = launch.dequantize(weight, out)
    return result.t() if weight.transposed() else result
'''
BUILD = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 6
license = "MIT"
backends = ["cuda"]

[torch-noarch]
"""
CARD = f"""---
license: mit
tags: [kernel, bitsandbytes, nf4]
---
# {NAME}

Dequantize bitsandbytes' 4-bit weights (NF4, FP4) with one Triton kernel. Results are bit-identical to those of bitsandbytes.
It needs an NVIDIA GPU, Tesla T4 or newer.

```python
from kernels import get_kernel

kernel = get_kernel("OWNER/{NAME}", version={VERSION}, trust_remote_code=True)
dense = kernel.dequantize_4bit(layer.weight, layer.weight.quant_state)  # layer: a bitsandbytes.nn.Linear4bit on the GPU
```
"""


def build(folder: Path) -> None:
    """Write the repository into ``folder``: the sources to torch-ext, and the variant that `kernels` loads to build."""
    files = {
        path.relative_to(ROOT / "nf4_patch"): path.read_text()
        for name in MODULES
        for path in (ROOT / "nf4_patch").glob(name)
    }
    # In place of the tables of libraries, the kernel gets the names of the Python modules that it looks up.
    files = {Path("__init__.py"): INIT, Path("patching", "targets.py"): f"MODULES = {LOOKED_UP!r}\n", **files}
    digest = hashlib.sha256(json.dumps([(path.as_posix(), text) for path, text in sorted(files.items())]).encode())
    module = NAME.replace("-", "_")
    metadata = {
        "name": NAME, "id": f"_{module}_cuda_{digest.hexdigest()[:7]}", "version": VERSION, "license": "MIT",
        "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    written = {Path("build.toml"): BUILD, Path("README.md"): CARD, Path("LICENSE"): (ROOT / "LICENSE").read_text()}
    for place in (Path("torch-ext", module), Path("build", "torch-universal")):
        shutil.rmtree(folder / place, ignore_errors=True)  # a module of an earlier build
        written |= {place / path: text for path, text in files.items()}
    written[Path("build", "torch-universal", "metadata.json")] = json.dumps(metadata, indent=2) + "\n"
    for path, text in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
