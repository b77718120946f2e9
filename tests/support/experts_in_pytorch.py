"""A fixture for folders whose tests run experts. Their ``conftest.py`` imports it."""

from __future__ import annotations

import pytest

from nf4_patch.moe import launch


@pytest.fixture(autouse=True)
def experts_in_pytorch(monkeypatch):
    """Run the experts in PyTorch, with the bits of transformers' forward.

    test_experts_forward.py runs the kernels. Interpreted kernels take a second for the rows of a hundred tokens.
    """
    monkeypatch.setattr(launch, "supports", lambda tensor: False)
