"""``nf4-patch inspect``: counts from the machine code, times marked as modelled."""

from __future__ import annotations

import json

import pytest
from subprocess_python import python

from nf4_patch.tools.sass import inspect


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """In a process of its own: the kernels may be under the interpreter here."""
    file = tmp_path_factory.mktemp("inspect") / "report.json"
    done = python(f"from nf4_patch.tools.cli import main; main(['inspect', '--matmul', '--json', {str(file)!r}])")
    return done.stdout, json.loads(file.read_text())


def test_the_challenge_is_601_gigabytes():
    assert inspect.challenge_bytes() / 1e9 == pytest.approx(601.5, abs=0.5)


def test_counts_beside_bitsandbytes(report):
    rows = {(row["dtype"], row["who"]): row for row in report[1]["kernels"]}
    assert len(rows) == 6
    for dtype, budget in (("float16", 9.5), ("bfloat16", 11.5)):
        ours, theirs = rows[dtype, "nf4_patch"], rows[dtype, "bitsandbytes"]
        assert 5 < ours["per_element"] <= budget
        assert theirs["per_element"] > 2 * ours["per_element"]
        assert sum(ours["by_pipe"].values()) == pytest.approx(ours["per_element"])
        assert ours["occupancy"] == 1.0 and ours["registers"] <= 64


def test_bounds_hold_together(report):
    text, data = report
    assert {row["clock"] for row in data["roofs"]} == {1.59, 0.9}
    for row in data["roofs"]:
        assert row["best"] >= max(0.999 * row["memory"], 1.879)  # 320 GB/s: the floor of any kernel
        assert row["worst"] == pytest.approx(row["memory"] + row["busy"], rel=0.02)
    for line in text.splitlines():
        if " times (" in line:
            assert inspect.MODELLED in line
    assert text.count(inspect.MODELLED) >= 8


def test_products_beside_bitsandbytes(report):
    """Where the offer in nf4/matmul.py comes from: slower than theirs at one row, faster from four on, by both bounds."""
    text, data = report
    rows = {(row["n"], row["k"], row["m"], row["clock"], row["who"]): row for row in data["products"]}
    assert len(rows) == len(data["products"]) == 2 * 2 * 3 * 6
    for (*size, who), ours in rows.items():
        if who == "nf4_patch":
            theirs = rows[(*size, "bitsandbytes")]
            assert ours["memory"] == theirs["memory"] > 35
            for bound in (max, sum):
                ratio = bound((theirs["memory"], theirs["busy"])) / bound((ours["memory"], ours["busy"]))
                assert 0.7 < ratio <= 1 if size[2] == 1 else 1.4 < ratio < 3.2, (size, ratio)
    assert "Products of few rows" in text


def test_every_multiplication_of_a_product_is_counted_once():
    """On sizes that share out evenly: tensor cores for rows in eights, bitsandbytes' for its tiles, its shuffles for one row."""
    python(
        """
    from nf4_patch.nf4.matmul import launch as matmul
    from nf4_patch.tools.sass import inspect, product_roof

    t4, n, k = inspect.GPUS[0], 5120, 4096
    def counted(ways, name):
        return 40 * sum(times * sum(one.name == name for one in instructions) for instructions, times in ways)
    for row in matmul.CANDIDATES:
        for m in (1, 8, 16, 64)[: 3 if row.m < 64 else 4]:
            ways = product_roof.ours(t4, row.config, m, n, k)
            assert 1024 * counted(ways, "HMMA") == -(-m // 8) * 8 * n * k, (row, m)
            assert 32 * counted(ways, "IDP") == n * k / 2  # a lookup a byte
    for m, tile in ((4, 32), (32, 32), (64, 64)):
        ways = product_roof.theirs(t4, m, n, k)
        assert 1024 * counted(ways, "HMMA") == tile * n * k, m
        assert n * k <= 32 * counted(ways, "SHFL") <= 1.02 * n * k  # the tile before the loop as well
    assert 32 * counted(product_roof.theirs(t4, 1, n, k)[1:], "SHFL") == n * k
    """
    )


def test_the_model_on_an_h200_against_what_was_measured_there():
    """N, K, M: us of ours and of bitsandbytes' own kernel in docs/matmul.md (bf16, nested; one H200, torch 2.11.0+cu130, triton
    3.6.0, bitsandbytes 0.50.2). The times are 1.5 to 2.3 times the overlapped bounds, their ratio is the bounds' within a fifth."""
    python(
        """
    from math import ceil
    from nf4_patch.nf4.matmul import launch as matmul
    from nf4_patch.tools.sass import inspect, product_roof

    h200 = inspect.GPUS[1]
    MEASURED = {
        (14336, 4096, 1): (16.5, 29.7), (14336, 4096, 2): (16.6, 44.7), (14336, 4096, 4): (16.9, 67.1),
        (14336, 4096, 8): (17.0, 67.0), (14336, 4096, 16): (21.0, 67.8), (14336, 4096, 32): (30.5, 69.8),
        (4096, 14336, 1): (18.6, 30.0), (4096, 14336, 2): (19.2, 44.4), (4096, 14336, 4): (19.7, 74.4),
        (4096, 4096, 1): (7.0, 10.8), (4096, 4096, 2): (7.0, 15.3), (4096, 4096, 4): (7.2, 24.0),
    }
    for (n, k, m), (us, them) in MEASURED.items():
        if m <= 3 or n == 4096:  # too few tiles for the tensor cores
            theirs = product_roof.looped(h200, f"gemm_4bit_simtI13__nv_bfloat16Li{m}E", ceil(n / 4), 4, ceil(k / 1024))
        else:
            name = "gemm_4bit_sm80_m16n8k16I13__nv_bfloat16Li32ELi64ELi128E"
            theirs = product_roof.looped(h200, name, ceil(n / 64), 8, k // 128)
        ours = product_roof.ours(h200, matmul.config_for((9, 0), m, n, k), m, n, k)
        a, b = (product_roof.bounds(h200, "", ways, m, n, k, 1.98, 3880) for ways in (ours, theirs))
        assert 1.4 < us / a.best < 2.2 and 1.6 < them / b.best < 2.4, (n, k, m, us / a.best, them / b.best)
        assert 0.85 < (them / us) / (b.best / a.best) < 1.2, (n, k, m, them / us, b.best / a.best)
    """
    )


def test_an_unknown_architecture_is_a_sentence():
    code = "from nf4_patch.tools.cli import main; main(['inspect', '--arch', 'volta'])"
    done = python(code, check=False)
    assert done.returncode == 1
    assert "'volta' is no architecture" in done.stderr
