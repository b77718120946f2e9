"""What is said on stderr about the environment: a sign of life, an option without effect, and to whom it is not said."""

from __future__ import annotations

import pytest
from subprocess_python import command, python

ON, UNUSED = "is on (NF4_PATCH=1", "had no effect, the patch was off"


def said(code: str, **environ: str) -> list[str]:
    """The lines on stderr that are ours; nothing is on stdout."""
    done = python(code, **environ)
    assert done.stdout == ""
    return [line for line in done.stderr.splitlines() if line.startswith("nf4_patch")]


@pytest.mark.parametrize(
    "code",
    ["import bitsandbytes", "import nf4_patch, bitsandbytes", "import bitsandbytes, nf4_patch; nf4_patch.enable()",
     "import bitsandbytes, logging; logging.basicConfig(level='INFO')"],
)  # fmt: skip
def test_one_line_when_the_environment_switches_the_patch_on(code):
    (line,) = said(code, NF4_PATCH="1", NF4_PATCH_CACHE="6GiB")
    assert ON in line and "NF4_PATCH_CACHE=6GiB" in line and "NF4_PATCH_QUIET=1" in line


@pytest.mark.parametrize(
    ("code", "variables"),
    [("import bitsandbytes", {"NF4_PATCH_QUIET": "1"}), ("import bitsandbytes", {"RANK": "1", "LOCAL_RANK": "0"}),
     ("import bitsandbytes", {"LOCAL_RANK": "3"}), ("import bitsandbytes", {"NF4_USE_TRITON": "0"}),
     ("import nf4_patch", {}), ("import nf4_patch; nf4_patch.disable(); import bitsandbytes", {}),
     ("import logging; logging.getLogger('nf4_patch').setLevel('ERROR'); import bitsandbytes", {}),
     ("import sys; sys.stderr = None; import bitsandbytes", {})],
)  # fmt: skip
def test_nothing_is_said_where_nobody_is_to_hear_it(code, variables):
    assert said(code, NF4_PATCH="1", **variables) == []


def test_rank_0_says_it():
    assert len(said("import bitsandbytes", NF4_PATCH="1", RANK="0", LOCAL_RANK="0")) == 1


def test_workers_of_the_process_say_nothing(tmp_path):
    """Spawned ones import the script, and bitsandbytes with it."""
    (tmp_path / "script.py").write_text("""
import bitsandbytes, multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
""")
    done = command("run", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(ON) == 1  # a plain run has no report: this is its sign of life


def test_enable_in_the_code_is_told_nothing():
    code = "import nf4_patch, bitsandbytes; nf4_patch.enable(); nf4_patch.disable()"
    assert said(code, NF4_PATCH_CACHE="6GiB", NF4_PATCH_STRICT="1") == []


def test_an_option_that_had_no_effect_is_named():
    (line,) = said("import bitsandbytes", NF4_PATCH_CACHE="6GiB", NF4_PATCH_MATMUL="AUTO", NF4_PATCH_DEFER="auto")
    assert f"NF4_PATCH_MATMUL=AUTO, NF4_PATCH_CACHE=6GiB {UNUSED}" in line
    assert "NF4_PATCH=1 or nf4_patch.enable()" in line
    assert len(said("import bitsandbytes; raise SystemExit", NF4_PATCH_CACHE="6 gigs")) == 1


@pytest.mark.parametrize(
    ("code", "variables"),
    [("import bitsandbytes", {"NF4_PATCH": "0"}), ("import bitsandbytes", {"NF4_USE_TRITON": "0"}),
     ("import bitsandbytes", {"NF4_PATCH_QUIET": "1"}), ("import bitsandbytes", {"RANK": "1"}),
     ("import nf4_patch", {}),  # there was nothing to patch
     ("import bitsandbytes, os, sys\nif os.fork():\n    os.wait(); os._exit(0)", {})],  # a fork is another process
)  # fmt: skip
def test_an_option_is_not_named_where_the_patch_is_not_missed(code, variables):
    assert said(code, NF4_PATCH_CACHE="6GiB", **variables) == []


@pytest.mark.parametrize("variables", [{}, {"NF4_PATCH": "1"}])
def test_the_command_line_says_it_in_its_reports(variables):
    done = command("doctor", NF4_PATCH_CACHE="6GiB", **variables)
    assert "NF4_PATCH_CACHE=6GiB" in done.stdout
    assert ON not in done.stderr and UNUSED not in done.stderr


@pytest.mark.parametrize(
    "variables", [{"NF4_PATCH_CACHE": "off"}, {"NF4_PATCH_STRICT": "0"}, {"NF4_PATCH_CALIBRATION": "off"}]
)
def test_an_option_that_asks_for_nothing_is_not_named(variables):
    assert said("import bitsandbytes", **variables) == []
