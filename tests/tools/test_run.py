"""``nf4-patch run`` beside ``python``: what a script sees, how it ends, what the report says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from subprocess_python import command

from nf4_patch.patching.guards import Reason

TRAINING = """
import bitsandbytes as bnb, torch
layer = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16).to(torch.bfloat16).to("cpu")
for _ in range(3):
    layer(torch.randn(5, 128, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
"""


def test_run_passes_errors_through_and_patches_children(tmp_path):
    (tmp_path / "script.py").write_text("import os; print(os.environ['NF4_PATCH']); raise KeyError('planted')")
    done = command("run", "--report", "script.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("1\n")
    assert "KeyError: 'planted'" in done.stderr
    assert "runpy" not in done.stderr and "nf4_patch/tools" not in done.stderr
    assert "0 dequantizations in the kernel" in done.stdout
    assert command("run", cwd=tmp_path).returncode == 2
    done = command("run", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2 and "can't open 'nothing.py': No such file or directory" in done.stderr


def test_run_reports_hits_and_what_was_never_hit(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    done = command(
        "run", "--report", "--json", "report.json", "train.py", cwd=tmp_path, interpreted=True, CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    first = report["status"]["targets"][0]
    assert (first["name"], first["hits"], first["fallbacks"]) == ("bitsandbytes.functional.dequantize_4bit", 3, {})
    assert report["status"]["shapes"] == {"64x128 bfloat16": 3}
    assert "3 dequantizations in the kernel, 0 by the original" in done.stdout
    (tmp_path / "idle.py").write_text("import bitsandbytes")
    done = command("run", "--report", "idle.py", cwd=tmp_path)
    assert "bitsandbytes.functional.dequantize_4bit: installed, never called" in done.stdout


def test_run_reports_fallbacks_with_advice_and_a_line_for_each_target_that_matters(tmp_path):
    """At 80 columns, no name is cut."""
    (tmp_path / "train.py").write_text(TRAINING)
    done = command("run", "--report", "train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    reason = Reason.NOT_CUDA
    assert f"3 x NOT_CUDA: {reason.sentence} -> {reason.advice}" in done.stdout
    assert "bitsandbytes.functional.dequantize_4bit: installed, never hit" in done.stdout
    done = command(
        "run", "--report", "train.py", cwd=tmp_path, COLUMNS="80", TTY_COMPATIBLE="1", CUDA_VISIBLE_DEVICES=""
    )
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines if "0  " in line and "dequantize_4bit" in line] == [
        ["0", "3", "bitsandbytes.functional.dequantize_4bit"]
    ]
    assert re.search(r"\d+ more targets: .*\d+ waiting for unsloth", done.stdout)
    assert "\u2026" not in done.stdout and "fast_gemv" not in done.stdout


def test_run_obeys_the_switch(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    done = command(
        "run", "--report", "train.py", cwd=tmp_path, interpreted=True, NF4_PATCH="0", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    assert "The patch was off" in done.stdout
    assert "0 dequantizations in the kernel" in done.stdout


# What a script can ask of its surroundings, also when its main thread has ended.
SURROUNDINGS = """
import atexit, inspect, os, pickle, sys, threading, time
import beside
print(__name__, __file__, __spec__ and __spec__.name, type(__loader__).__name__, __builtins__, sys.argv, sys.path[0])
class Pickled: pass
def late(when):
    os.chdir("/")
    import beside_late
    pickle.dumps(Pickled)
    print(when, inspect.getsource(late)[:8], sys.modules["__main__"].late is late, sys.argv, sys.path[0], flush=True)
def in_thread():
    threading.main_thread().join()
    late("thread")
threading.Thread(target=in_thread).start()
atexit.register(late, "atexit")
"""


def both(*arguments: str, cwd, **environ: str):
    """``python ...`` and ``nf4-patch run ...``: their stdout, stderr and exit codes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NF4_")} | environ
    commands = ([sys.executable, *arguments], [sys.executable, "-m", "nf4_patch", "run", *arguments])
    done = [subprocess.run(c, capture_output=True, text=True, cwd=cwd, env=environment) for c in commands]
    return [(one.stdout, one.stderr, one.returncode) for one in done]


@pytest.fixture
def place(tmp_path):
    """A folder with the script, and a folder and a zip file that can be run."""
    (tmp_path / "script.py").write_text(SURROUNDINGS)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "beside_late.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(
        "import sys\nprint(__file__, __spec__.name, sys.argv, sys.path[0])"
    )
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "folder" / "__main__.py", "__main__.py")
    return tmp_path


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"], ["folder"], ["archive.zip"]], ids=" ".join)
def test_a_run_sees_what_it_sees_under_python(arguments, place):
    theirs, ours = both(*arguments, "a", "--report", "-m", "--json", "x", "--help", cwd=place)
    assert ours == theirs
    if "script" in arguments[-1]:
        assert [line.split()[0] for line in ours[0].splitlines()] == ["__main__", "thread", "atexit"]


@pytest.mark.parametrize(
    "text",
    ["a b", "import sys; sys.exit(3)", "import sys; sys.exit('why')", "1 / 0", "import sys; sys.stdout.close()",
     "import sys; sys.stdout = None"],
)  # fmt: skip
def test_a_run_ends_as_under_python(text, tmp_path):
    (tmp_path / "script.py").write_text(text)
    theirs, ours = both("script.py", cwd=tmp_path)
    assert ours == theirs


@pytest.mark.parametrize("report", [[], ["--report"]], ids=["plain", "report"])
def test_a_reader_that_has_gone(report, tmp_path):
    """Python's exit code; no traceback."""
    (tmp_path / "script.py").write_text("print('text')")
    reading, writing = os.pipe()
    os.close(reading)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "nf4_patch", "run", *report, "script.py"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (120, "")


def test_the_report_is_written_where_the_run_began(tmp_path):
    (tmp_path / "script.py").write_text("import os; os.chdir('/')")
    done = command("run", "--json", "report.json", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["code"] == 0
