"""A calibration of a GPU that no shipped table knows: the entry that a file would hold for it."""

from __future__ import annotations

from nf4_patch.nf4.matmul.tuning import SmallMConfig
from nf4_patch.tools.bench.record import BITSANDBYTES, OURS

ADA = (8, 9)
NAMES = {0: "NVIDIA GeForce RTX 4090", 1: "NVIDIA L40S"}
GPU = "NVIDIA GeForce RTX 4090, sm_89"
RELEASES = {"nf4_patch": "0.1.0", "triton": "3.6.0", "bitsandbytes": "0.50.2", "unsloth": None}
CONFIG = SmallMConfig(tiles=1, warps_n=1, warps_k=8, load_128bit=True, ctas_per_sm=2)


def row(m, config):
    return {
        "m": m,
        "config": config and config._asdict(),
        "us": {OURS: 10.0, BITSANDBYTES: 20.0 + m},
        "noise": 0.004,
    }


def entry_of(**changes):
    return {
        "date": "2026-11-21",
        "releases": {"torch": "2.11.0", **RELEASES},
        "dtype": "bfloat16",
        "matmul": {"4096x4096": [row(1, None), row(8, CONFIG), row(64, None)], "1024x4096": [row(8, CONFIG)]},
        **changes,
    }
