"""``nf4-patch inspect``: counts from the machine code, times marked as modelled."""

from __future__ import annotations

import json

import pytest
from subprocess_python import python

from nf4_patch.tools import inspect


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """In a process of its own: the kernels may be under the interpreter here."""
    file = tmp_path_factory.mktemp("inspect") / "report.json"
    done = python(f"from nf4_patch.tools.cli import main; main(['inspect', '--json', {str(file)!r}])")
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


def test_an_unknown_architecture_is_a_sentence():
    code = "from nf4_patch.tools.cli import main; main(['inspect', '--arch', 'volta'])"
    done = python(code, check=False)
    assert done.returncode == 1
    assert "'volta' is no architecture" in done.stderr
