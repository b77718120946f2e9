"""The program that compute-sanitizer checks: ``sanitized.py dequantize|small_m``."""

import sys

import torch
from fused_matmul import multiply, one_hot
from fuzz import fuzz
from oracle import layout_of, quantized

from nf4_patch.nf4.dequantize import reference
from nf4_patch.matmul import launch
from nf4_patch.matmul.tuning import SMALL_M_ROWS


def check(n, k, m, nested, configs):
    # quantized on the CPU: bitsandbytes' own kernel (0.50.2) fails memcheck on partial last blocks
    layout = layout_of(*quantized((n, k), torch.bfloat16, "cpu", nested=nested))
    layout = layout._replace(**{name: t.cuda() for name, t in layout._asdict().items() if isinstance(t, torch.Tensor)})
    columns = torch.randint(0, k, (m,), device="cuda")
    x, want = one_hot(columns, k, torch.bfloat16), reference.dequantize(layout)[:, columns].t()
    for config in configs:
        assert torch.equal(multiply(x, layout, config=config), want)


def dequantize():
    report = fuzz(60, 7, blocksizes=(64,), oracle="formula")  # not bitsandbytes, for the same reason
    assert report.hits and not report.exit_code


def small_m():
    """Multiply with every row of the table, with tails of N and K, and with parts of K."""
    here = torch.cuda.get_device_capability()
    for n, k in ((250, 320), (4003, 4416), (1003, 4096), (12003, 320)):
        for m in (1, 9, 17, 64):
            config = launch.config_for(here, m, n, k) or next(row.config for row in SMALL_M_ROWS if row.max_m >= m)
            check(n, k, m, n != 250, [config])


{"dequantize": dequantize, "small_m": small_m}[sys.argv[1]]()
