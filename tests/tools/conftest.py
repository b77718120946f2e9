"""A machine with GPUs that no shipped table knows, without a GPU."""

from __future__ import annotations

import pytest
import torch
from calibrated import ADA, NAMES, RELEASES

from nf4_patch.nf4.matmul import calibration
from nf4_patch.patching import hooks
from nf4_patch.tools.bench import calibrate


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs that no table knows; ``machine(entries)`` makes the file, which is then the one in use."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAMES[device])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: ADA)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    file = tmp_path / "cache" / "calibration.json"

    def use(entries):
        if isinstance(entries, dict):
            calibrate.write(file, entries)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(entries)
        calibration.use(file, lambda: RELEASES)
        hooks.forget_calibration()
        return file

    yield use
    calibration.use(None, lambda: RELEASES)
    hooks.forget_calibration()
