"""A machine with GPUs that no shipped table knows, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from calibration import ADA, NAMES, RELEASES

from nf4_patch.nf4 import runtime
from nf4_patch.patching import calibrated


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs that no table knows; ``machine(entries)`` makes the file, which is then the one in use."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAMES[device])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: ADA)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 128)
    monkeypatch.setattr(calibrated, "releases", lambda: RELEASES)
    file = tmp_path / "cache" / "calibration.json"

    def use(entries):
        if isinstance(entries, dict):
            calibrated.write(file, entries)
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(entries)
        calibrated.use(SimpleNamespace(calibration=file))
        calibrated.forget()
        return file

    yield use
    calibrated.use(SimpleNamespace(calibration=None))
    calibrated.forget()
