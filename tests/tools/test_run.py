"""``nf4-patch run`` next to ``python``: what a script sees, how it ends, what the report says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from subprocess_python import command

from nf4_patch.patching import deferral
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.state import State
from nf4_patch.patching.status import NEVER_CALLED, NEVER_HIT, CacheStatus, Status, TargetStatus
from nf4_patch.patching.switch import switch
from nf4_patch.tools import run

PROGRAMS = Path(__file__).parents[1] / "programs"
TRAINING = (PROGRAMS / "training.py", 3)


def test_run_passes_errors_through_and_patches_children(tmp_path):
    (tmp_path / "script.py").write_text("import os; print(os.environ['NF4_PATCH']); raise KeyError('planted')")
    done = command("run", "--report", "script.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("1\n")
    assert "KeyError: 'planted'" in done.stderr
    assert "runpy" not in done.stderr and "nf4_patch/tools" not in done.stderr
    assert "0 in the kernel, 0 fell back" in done.stdout
    assert command("run", cwd=tmp_path).returncode == 2
    done = command("run", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2 and "can't open 'nothing.py': No such file or directory" in done.stderr


def test_run_reports_hits_and_what_was_never_hit(tmp_path):
    done, report = reported(tmp_path, *TRAINING, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    first = report["status"]["targets"][0]
    assert (first["name"], first["hits"], first["fallbacks"]) == ("bitsandbytes.functional.dequantize_4bit", 3, {})
    assert report["status"]["shapes"] == {"64x128 bfloat16": 3}
    assert "3 in the kernel, 0 fell back" in done.stdout
    (tmp_path / "idle.py").write_text("import bitsandbytes")
    done = command("run", "--report", "idle.py", cwd=tmp_path)
    assert "Nothing that is patched was called by eager code." in done.stdout
    assert "is on" not in done.stderr  # the report says more


def test_run_reports_fallbacks_with_advice_and_a_line_for_each_target_that_matters(tmp_path):
    """At 80 columns, no name is cut."""
    done = command("run", "--report", *TRAINING, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    reason = Reason.NOT_CUDA
    assert f"3 x NOT_CUDA: {reason.sentence} -> {reason.advice}" in done.stdout
    assert "bitsandbytes.functional.dequantize_4bit: patched, 0 hits (installed, never hit)" in done.stdout
    terminal = {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = command("run", "--report", *TRAINING, cwd=tmp_path, **terminal)
    assert "bitsandbytes.functional.dequantize_4bit: patched, 0 hits" in done.stdout
    assert re.search(r"\d+ more targets: .*\d+ not imported \(.*unsloth", done.stdout.replace("\n", ""))
    assert "\u2026" not in done.stdout and "fast_gemv" not in done.stdout


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--json"], "'--json' requires an argument"),
        (["--report", "-m"], "name a script, or a module with -m"),
        (["--json", "script.py"], "(--json writes to /"),
        (["--"], "name a script"),
    ],
)
def test_what_is_missing_is_named(words, missing, tmp_path):
    (tmp_path / "script.py").write_text("")
    done = command("run", *words, cwd=tmp_path)
    assert done.returncode == 2 and missing in " ".join(done.stderr.split()), done.stderr


def test_two_dashes_end_the_options_as_under_python(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    done = command("run", "--json", "report.json", "--", "script.py", "--", "--report", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['--', '--report']\n"), done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["command"] == ["script.py", "--", "--report"]


def test_a_run_of_experts_in_16_bits_and_a_dense_model_are_told_apart():
    """A target whose feature the model does not have is no advice; experts that are not packed are."""
    targets = [
        TargetStatus("bitsandbytes.functional.dequantize_4bit", State.PATCHED, 3),
        TargetStatus("transformers.integrations.moe.ExpertsInterface._global_mapping.grouped_mm", State.PATCHED, note=NEVER_CALLED),
    ]  # fmt: skip

    def report(*targets):
        status = Status(True, targets, {}, ())
        return run.RunReport(["train.py"], True, 0, 1.0, status, shown=True)

    dense = report(*targets)
    assert dense.advice() == [] and "1 more target: 1 not called" in "\n".join(dense.render())
    moe = report(targets[0], replace(targets[1], fallbacks={"EXPERTS_NOT_PACKED": 2}, note=NEVER_HIT))
    said = f"2 x EXPERTS_NOT_PACKED: {Reason.EXPERTS_NOT_PACKED.sentence} -> pack them"
    assert said in "\n".join(moe.render()) and any(said in line for line in moe.as_dict()["advice"])
    launched = replace(dense, command=["-m", "torch.distributed.run", "train.py"])
    assert any("`torchrun --no-python nf4-patch run --report train.py`" in line for line in launched.advice())


@pytest.mark.parametrize(
    ("kernels", "defer", "said"), [(True, "auto", True), (True, "never", False), (False, "auto", False)]
)
def test_a_run_with_unsloth_says_what_it_keeps(kernels, defer, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", SimpleNamespace(_USE_NF4_KERNELS=kernels))
    monkeypatch.setattr(switch, "defer", defer)
    report = run.RunReport(["train.py"], True, 0, 1.0, Status(True, (), {}, ()), shown=True)
    assert (deferral.KEPT["unsloth"] in report.advice()) is said


def test_run_obeys_the_switch(tmp_path):
    done, _ = reported(tmp_path, *TRAINING, NF4_PATCH="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "The patch was off" in done.stdout
    assert "0 in the kernel, 0 fell back" in done.stdout


def both(*arguments: str, cwd, **environ: str):
    """``python ...`` and ``nf4-patch run ...``: their stdout, stderr and exit codes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NF4_")} | environ
    commands = ([sys.executable, *arguments], [sys.executable, "-m", "nf4_patch", "run", *arguments])
    done = [subprocess.run(c, capture_output=True, text=True, cwd=cwd, env=environment) for c in commands]
    return [(one.stdout, one.stderr, one.returncode) for one in done]


@pytest.fixture
def place(tmp_path):
    """A folder with the script, and a folder and a zip file that can be run."""
    shutil.copy(PROGRAMS / "surroundings.py", tmp_path / "script.py")
    for name in ("neighbour.py", "late_neighbour.py"):
        (tmp_path / name).write_text("")
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


# A user's own excepthook that fails, or ends the process.
HOOKS = [
    f"import sys\ndef hook(*error):\n    {what}\nsys.excepthook = hook\n1 / 0"
    for what in ("raise KeyError('in the hook')", "sys.exit(3)", "sys.exit('why')", "print('seen')")
]


@pytest.mark.parametrize(
    "text",
    ["a b", "import sys; sys.exit(3)", "import sys; sys.exit('why')", "1 / 0", "import sys; sys.stdout.close()",
     "import sys; sys.stdout = None", *HOOKS],
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


def reported(folder, *words, **environ):
    """A run with a report: its process, and its JSON (None: not written). ``words``: a script and its arguments."""
    done = command("run", "--report", "--json", "report.json", *words, cwd=folder, interpreted=True, **environ)
    file = folder / "report.json"
    return done, json.loads(file.read_text()) if file.exists() else None


def reported_text(folder, text, **environ):
    (folder / "script.py").write_text(text)
    return reported(folder, "script.py", **environ)


def test_a_failing_excepthook_loses_no_report(tmp_path):
    done, report = reported_text(tmp_path, HOOKS[0])
    assert done.returncode == report["code"] == 1
    assert done.stdout.count("0 in the kernel, 0 fell back") == 1
    assert "Error in sys.excepthook:" in done.stderr and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("end", ["", "sys.exit(5)", "raise SystemExit"])
def test_a_forked_child_has_no_report(end, tmp_path):
    done, report = reported_text(
        tmp_path,
        f"""
import os, sys
if not os.fork():
    print("child", flush=True)
    {end or "pass"}
else:
    os.wait()
    sys.exit(7)
""",
    )
    assert done.returncode == report["code"] == 7
    assert done.stdout.count("child") == done.stdout.count("in the kernel, 0 fell back") == 1


def test_a_thread_that_outlives_the_script_is_waited_for(tmp_path):
    """It trains on after the main thread's end, which it can wait for; then come atexit handlers, as under Python."""
    done, report = reported(tmp_path, PROGRAMS / "training_in_a_thread.py", CUDA_VISIBLE_DEVICES="")
    assert report["status"]["shapes"] == {"64x128 bfloat16": 3}, done.stderr
    assert done.stdout.startswith("trained\n") and done.stdout.endswith("the end\n")


def test_a_weight_without_dimensions_is_reported(tmp_path):
    done, report = reported_text(tmp_path, """
import bitsandbytes.functional as F, torch
packed, state = F.quantize_4bit(torch.tensor(1.0), quant_type="nf4")
assert F.dequantize_4bit(packed, state).shape == ()
""", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert done.returncode == 0 and report["status"]["shapes"] == {"1 float32": 1}, done.stderr


@pytest.mark.parametrize(
    ("ranks", "reports"), [({"RANK": "0", "LOCAL_RANK": "0"}, 1), ({"RANK": "8", "LOCAL_RANK": "0"}, 0)]
)
def test_under_a_launcher_rank_0_reports(ranks, reports, tmp_path):
    done, report = reported_text(tmp_path, "import sys; sys.exit(3)", **ranks)
    assert done.returncode == 3 and (report is not None) == bool(reports)
    assert done.stdout.count("in the kernel, 0 fell back") == reports


def test_a_launcher_in_the_place_of_the_script_says_how_to_count_its_processes(tmp_path):
    text = """import os, sys; sys.stdout.write(f"rank {os.environ['RANK']} {os.environ['NF4_PATCH']}\\n")"""
    (tmp_path / "train.py").write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = command("run", "--report", *launcher, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 1" in done.stdout and "rank 1 1" in done.stdout  # patched, and not counted
    assert "Nothing was patched: this process imported neither" in done.stdout
    assert "`torchrun --no-python nf4-patch run --report train.py`" in done.stdout


def test_which_budget_would_have_saved_what():
    shapes = {"4096x4096 bfloat16": 3000, "14336x4096 bfloat16": 3000, "64x64 bfloat16 fused matmul": 7}
    weights = {"4096x4096 bfloat16": 10, "14336x4096 bfloat16": 10}
    (line,) = run.of_the_cache(replace(Status(True, (), shapes, ()), weights=weights))
    assert line.startswith("cache: 20 weights would take 1.43 GiB dequantized")
    assert "100% of the dequantizations" in line and 'cache="0.71GiB" at least 50%' in line
    assert run.of_the_cache(replace(Status(True, (), {"64x64 bfloat16": 5}, ()), weights={"64x64 bfloat16": 5})) == []
    assert run.of_the_cache(Status(True, (), {}, ())) == []
    held = CacheStatus("6442450944", {0: 2**30}, 10, 75, 25)
    assert run.of_the_cache(replace(Status(True, (), shapes, ()), weights=weights, cache=held)) == []
