"""The cache under FSDP2 and in Unsloth's autograd functions, each in a process of its own. No GPU is needed."""

from __future__ import annotations

import pytest
import torch
from subprocess_python import program
from unsloth_releases import RELEASES, with_unsloth

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_cache_gpu.py trains on the GPU")


def test_fsdp2():
    assert "REFILLED" in program("cached_fsdp2", interpreted=True).stdout


@RELEASES
def test_unsloth(release, tmp_path):
    assert "cached" in with_unsloth(release, tmp_path, "cached_unsloth")
