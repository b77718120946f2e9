"""TRL's own sft.py with LoRA in one function, switched on by the environment. Losses equal peft's within bf16's rounding."""

from __future__ import annotations

import json

import pytest
from subprocess_python import EVERY_KERNEL, program


@pytest.mark.newest
@pytest.mark.full
@pytest.mark.parametrize("liger", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["plain", "liger"])
def test_the_script_trains_as_with_peft(tmp_path, liger):
    pytest.importorskip("trl")
    if liger:  # Triton's interpreter does not run its kernels
        pytest.importorskip("liger_kernel")
    words = (tmp_path, *["--use_liger_kernel"] * liger)
    environment = {"NF4_PATCH": "1", "NF4_PATCH_LORA": "fused"}
    done = program("trl_sft", *words, fresh=True, cwd=tmp_path, **EVERY_KERNEL, **environment)
    fused, stock = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    assert not stock["fused"] and fused["fused"]
    assert len(stock["losses"]) == 6 and stock["losses"][-1] < stock["losses"][0] - 0.5
    assert fused["losses"] == pytest.approx(stock["losses"], rel=2**-7, abs=2**-7)
