"""``nf4-patch run`` compared with ``python``: how a command ends, which processes report, and the contents of the report."""

from __future__ import annotations

import json
import os
import sys
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_example import completed

from nf4_patch.snapshot import CacheStatus, Status, WeightStatus
from nf4_patch.tools import run

TRAINING = Path(__file__).parents[1] / "programs" / "training.py"
PRINT = (
    "import sys; us = sys.modules.get('nf4_patch'); print(__name__, sys.argv, sys.path, bool(us and us.is_enabled()))"
)
ENDS = {
    "exit": "sys.exit(3)",
    "words": "sys.exit('why')",
    "raise": "raise KeyError('planted')",
    "signal": "import os; os.kill(os.getpid(), 15)",
    "spawn": "import multiprocessing as m; print(m.get_context('spawn').Pool(1).map(abs, [-1]))",
}
REPORT = ("--report", "--json", "report.json")


def reported(*words: object, folder: Path, options: tuple[str, ...] = REPORT, **variables: str):
    """Run a command with a report. Return its process, and the contents of the JSON files by file name."""
    command = (sys.executable, "-m", "nf4_patch", "run", *options, *words)
    done = completed(command, folder, **variables)
    return done, {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("report*.json"))}


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        *(pytest.param(["script.py", "a", "--report"], f"{PRINT}\nif __name__ == '__main__': {end}", id=name)
          for name, end in ENDS.items()),
        pytest.param(["-m", "script", "-m", "x"], PRINT, id="module"),
        pytest.param(["-c", PRINT, "--json", "x"], "", id="code"),
        pytest.param(["python", "-u", "script.py"], PRINT, id="python"),
        pytest.param(["sh", "-c", "python script.py; exit 4"], PRINT, id="shell"),
    ],
)  # fmt: skip
def test_a_command_is_as_without_us_and_patched(words, text, tmp_path):
    """None of these commands imports bitsandbytes, so there is no report."""
    (tmp_path / "script.py").write_text(f"import sys\n{text}")
    own = [] if words[0] in ("python", "sh") else [sys.executable]
    theirs = completed([*own, *words], tmp_path)
    ours, reports = reported(*words, folder=tmp_path)
    assert (ours.stdout.replace("True", "False"), ours.stderr) == (theirs.stdout, theirs.stderr)
    assert (ours.returncode, reports) == (theirs.returncode, {})
    assert "True" in ours.stdout


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([], "no command to run"),
        ([""], "no command to run"),
        (["--json", "script.py"], "(--json took /"),
        (["--json"], "'--json' requires an argument"),
        (["nothing.py"], "nothing.py: No such file or directory"),
        (["nothing"], "nothing: No such file or directory"),
    ],
)
def test_what_is_missing_is_named(words, missing, tmp_path):
    done, _ = reported(*words, folder=tmp_path, options=())
    assert done.returncode == 2 and missing in " ".join(done.stderr.split()), done.stderr


CHILDREN = f"""
import multiprocessing, os, runpy, sys
if __name__ != "__main__":
    sys.path.insert(0, "empty")
import bitsandbytes
if __name__ == "__main__":
    runpy.run_path({str(TRAINING)!r}, run_name="__main__")
    for method in ("spawn", "fork"):
        child = multiprocessing.get_context(method).Process(target=print, args=(method,))
        child.start()
        child.join()
    if os.fork():
        os.wait()
"""


OFF = pytest.param({"NF4_PATCH": "0"}, 0, "off (NF4_PATCH=0)", marks=pytest.mark.full)


@pytest.mark.full
@pytest.mark.parametrize(("variables", "hits", "on"), [({}, 3, "on"), OFF])
def test_a_report_counts_what_ran_in_the_kernel_and_children_do_not_report(variables, hits, on, tmp_path):
    """A spawned child imports the script, which imports a module named bitsandbytes. A forked child has its parent's modules."""
    with_empty_bitsandbytes(tmp_path / "empty")
    (tmp_path / "script.py").write_text(CHILDREN)
    done, reports = reported("script.py", 3, folder=tmp_path, **variables)
    assert done.stdout.split("\n") == [f"hits: {hits}", "spawn", "fork", ""], done.stderr
    assert reports.keys() == {"report.json"} and done.stderr.count("in the kernel") == 1
    assert done.stderr.count("is on: NF4_PATCH=1") == (on == "on")
    status = reports["report.json"]["status"]
    assert sum(target["hits"] for target in status["targets"]) == hits
    assert status["enabled"] is (on == "on") and [s["hits"] for s in status["shapes"]] == [3] * bool(hits)
    assert done.stderr.count(f"nf4_patch is {on}: {hits} dequantizations in the kernel, 0 fell back") == 1


@pytest.mark.full
def test_another_rank_than_0_reports_if_all_do(tmp_path):
    """torchrun gives its second process this rank. test_code_blocks.py checks that the process prints nothing without
    --all-ranks.
    """
    done, reports = reported(TRAINING, folder=tmp_path, options=(*REPORT, "--all-ranks"), RANK="1", LOCAL_RANK="0")
    assert done.stdout == "hits: 1\n" and list(reports) == ["report.rank1.json"]
    assert done.stderr.count("nf4_patch, rank 1: ") == done.stderr.count("1 dequantizations in the kernel") == 1


def with_empty_bitsandbytes(folder: Path, script: str = "import bitsandbytes") -> Path:
    """Write a script and an empty module bitsandbytes, so that a process reports without PyTorch."""
    folder.mkdir(exist_ok=True)
    (folder / "bitsandbytes.py").write_text("")
    (folder / "script.py").write_text(script)
    return folder / "script.py"


FULL_DISK = pytest.param("2>/dev/full", "/dev/full", marks=pytest.mark.full)


@pytest.mark.full
@pytest.mark.parametrize("between", ["& ", pytest.param("; ", marks=pytest.mark.full)])
def test_every_process_of_a_shell_is_in_the_file(between, tmp_path):
    """The first process writes its report as if it were alone, and later processes add theirs.

    Another run starts with an empty file.
    """
    (tmp_path / "report.json").write_text("[1, 2")
    script = with_empty_bitsandbytes(tmp_path)
    for numbers in ("123", "21", "1"):
        line = "".join(f"{sys.executable} {script} {n}{between}" for n in numbers) + "wait"
        _, reports = reported("sh", "-c", line, folder=tmp_path, options=("--json", "report.json"))
        first = reports["report.json"]
        found = [first, *first["others"]]
        order = [each["command"].rpartition(" ")[2] for each in found]
        assert sorted(order) == sorted(numbers) and (between == "& " or order == [*numbers])
        assert {each["run"] for each in found} == {first["run"]}
        assert all(each["status"]["enabled"] and "others" not in each for each in found[1:])


@pytest.mark.full
@pytest.mark.parametrize("option", ["-I", "-E"])
def test_a_python_that_ignores_variables_is_patched_and_does_not_report(option, tmp_path):
    """bitsandbytes loads nf4_patch when it is imported."""
    look = "import importlib.metadata as m; print(len(m.entry_points(group='bitsandbytes.backends', name='nf4_patch')))"
    if completed([sys.executable, option, "-c", look], tmp_path).stdout != "1\n":
        pytest.skip("nf4_patch is not installed: no entry point")
    code = "import bitsandbytes, nf4_patch; print(nf4_patch.is_enabled())"
    done, reports = reported(sys.executable, option, "-c", code, folder=tmp_path)
    assert done.stdout == "True\n" and not reports, done.stderr


@pytest.mark.parametrize(("stderr", "file"), [("2>&-", "report.json"), FULL_DISK])
def test_without_a_stderr_the_report_goes_to_its_file_alone(stderr, file, tmp_path):
    """The file may be unwritable too.

    The report must not go to stdout, where it would break programs that read the command's output.
    """
    with_empty_bitsandbytes(tmp_path, "import bitsandbytes\nprint('done')")
    line = f'{sys.executable} -m nf4_patch run --report --json "$0" script.py {stderr}'
    done = completed(["sh", "-c", line, file], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    if file == "report.json":
        assert json.loads((tmp_path / file).read_text())["status"]["enabled"]


def test_the_sitecustomize_of_the_environment_runs_too(tmp_path):
    """It runs once for nf4-patch itself, and once for the command."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    done, _ = reported("-c", PRINT, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.stdout.startswith("theirs\ntheirs\n__main__") and done.stdout.endswith("True\n"), done.stderr


@pytest.mark.parametrize(
    ("options", "variables", "value"), [(("--fast",), {}, "fast"), ((), {"NF4_PATCH": "fast"}, "fast"), ((), {}, "1")]
)
def test_the_profile_reaches_the_command(options, variables, value, tmp_path):
    done, _ = reported("-c", "import os; print(os.environ['NF4_PATCH'])", folder=tmp_path, options=options, **variables)
    assert done.stdout == f"{value}\n", done.stderr


def test_a_python_without_nf4_patch_is_left_alone(tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    variables = {"PYTHONPATH": run.STARTUP, "NF4_PATCH": "1", run.REPORT: "[true, null, false]"}
    done = completed([tmp_path / "other" / "bin" / "python", "-c", PRINT], tmp_path, **variables)
    assert done.stdout.endswith("False\n") and done.stderr == "" and run.STARTUP not in done.stdout


@pytest.mark.parametrize("kernels", [True, False])
def test_a_run_with_unsloth_says_what_it_keeps(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", SimpleNamespace(_USE_NF4_KERNELS=kernels))
    assert ["Unsloth" in line for line in run.of_own_kernels()] == [True] * kernels


def test_the_report_of_another_run_is_replaced(tmp_path):
    file, found = tmp_path / "report.json", []
    for name in ("first", "first", "second"):
        run.add(file, {"run": name})
        found.append(json.loads(file.read_text()))
    first = {"run": "first", "others": [{"run": "first"}]}
    assert found == [first | {"others": []}, first, {"run": "second", "others": []}]


def test_which_budget_would_have_saved_what():
    sizes = (((4096, 4096), "", 3000, 10), ((14336, 4096), "", 3000, 10), ((64, 64), "fused matmul", 7, 0))
    status = Status(True, (), tuple(WeightStatus(shape, "bfloat16", *others) for shape, *others in sizes))
    (line,) = run.of_the_cache(status)
    assert line.startswith("cache: the 20 weights take 1.43 GiB dequantized")
    assert "saved 100% of the dequantizations, and a cache of half that size at least 50%" in line
    read_once = Status(True, (), (WeightStatus((64, 64), "bfloat16", "", 5, 5),))
    held = replace(status, cache=CacheStatus("6442450944", {0: 2**30}, 10, 75, 25))
    for nothing_to_save in (read_once, Status(True, ()), held):
        assert run.of_the_cache(nothing_to_save) == []
