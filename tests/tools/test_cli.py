"""The command line with the real libraries: doctor, verify, and the files that they write."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from subprocess_python import python
from target import TARGET, replaced_by
from verbs import output_of, report_of

import nf4_patch
from nf4_patch.callback import ReportCallback
from nf4_patch.libraries.unsloth import adapters as unsloth
from nf4_patch.nf4.dequantize import launch, reference
from nf4_patch.patching import direct
from nf4_patch.patching.config import Config
from nf4_patch.patching.counters import counters
from nf4_patch.patching.quant_state import weight_of
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.state import State
from nf4_patch.patching.targets import TARGETS
from nf4_patch.snapshot import TargetStatus
from nf4_patch.tools import advice, cases, cli, doctor, output, report
from nf4_patch.tools.cli import main

GPU = torch.cuda.is_available()
CODE = 0 if GPU else 1  # of doctor
UNSLOTH = "unsloth.kernels.utils._fast_dequantize_bnb"
WITHOUT_GPU = pytest.mark.skipif(GPU, reason="for a machine with no GPU")


def test_help_is_cheap():
    """The help does not import torch, which takes seconds."""
    done = python("""
        import contextlib, sys
        import nf4_patch
        from nf4_patch.tools.cli import main
        with contextlib.suppress(SystemExit):
            main(["--help"])
        print(nf4_patch.is_enabled(), [name for name in ("torch", "triton", "bitsandbytes") if name in sys.modules])
    """, fresh=True, NF4_PATCH="1")  # fmt: skip
    said = " ".join(done.stdout.split())
    assert all(f" {name} {verb.get_short_help_str(200)}" in said for name, verb in main.commands.items())
    assert "True []" in said


@pytest.mark.parametrize("verb", main.commands)
def test_every_verb_has_help_and_checks_its_file_before_the_work(verb, tmp_path):
    assert "--json FILE" in output_of(verb, "--help")
    said = output_of(verb, "--json", tmp_path / "missing" / "x", exit_code=2)
    assert f"'--json': Directory '{tmp_path / 'missing'}' does not exist" in said


def test_unknown_verb_and_unknown_value():
    output_of("polish", exit_code=2)
    said = output_of("doctor", exit_code=1, NF4_PATCH_STRICT="maybe")
    assert "NF4_PATCH_STRICT='maybe' is not allowed. Allowed: 0, 1, " in said


@WITHOUT_GPU
def test_without_a_gpu_there_are_no_numbers():
    said = output_of("verify", exit_code=1)
    assert said == f"Error: {report.why_no_gpu()}, so nothing can be measured or compared on this machine\n"


# doctor


def test_a_driver_that_is_too_old_for_torch_is_a_possible_cause(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "might be too old for CUDA 13.0" in report.why_no_gpu()


@WITHOUT_GPU
def test_doctor_without_a_gpu_says_so_and_exits_1(tmp_path):
    report = report_of(tmp_path, "doctor", "-v", exit_code=1)
    assert [p for p in report["problems"] if "NOT_CUDA" in p] == report["problems"]
    states = {target["name"]: target["state"] for target in report["targets"]}
    assert states["bitsandbytes.functional.dequantize_4bit"] == "patched"
    assert list(states) == [target.name for target in TARGETS]
    assert not nf4_patch.is_enabled()
    brief = [name for name, state in states.items() if state in doctor.BRIEFLY]
    assert not any(name in report["output"] for name in brief) and f"{len(brief)} more targets:\n" in report["output"]
    assert all(name in report["output"] for name in states.keys() - brief)
    said = output_of("doctor", exit_code=1)
    assert "Not ready: torch" in said and "doctor -v" in said and not any(name in said for name in states)


@pytest.mark.gpu
def test_doctor_with_a_gpu(tmp_path):
    (gpu, *_) = report_of(tmp_path, "doctor")["gpus"]
    assert list(gpu["kernels"]) == ["float16", "bfloat16", "float32"] and not gpu["failures"]


@pytest.mark.full
@WITHOUT_GPU
def test_a_terminal_of_80_columns_cuts_no_word_and_shows_another_character_for_one_that_it_has_not():
    done = python("""
        import sys
        sys.stdout.reconfigure(encoding="ascii")
        sys.stdout.isatty = lambda: True
        from nf4_patch.tools.cli import main
        main(["doctor", "-v"])
    """, check=False, COLUMNS="80", NF4_PATCH_CACHE="6\u2009GiB")  # fmt: skip
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)  # a name stays whole
    assert all(line.startswith("  ") for line in lines[1 : lines.index("")])  # what is continued is indented
    words = " ".join(done.stdout.split())
    assert all(
        words_ in words for words_ in (TARGETS[0].name, TARGETS[0].covers, "every call would run the original", "6?GiB")
    )


def test_doctor_names_a_function_that_it_does_not_know(tmp_path):
    with replaced_by(lambda packed, scales: None):
        report = report_of(tmp_path, "doctor", exit_code=1)
    assert any("found (packed, scales)" in problem for problem in report["problems"])


def gpu(capability=(9, 0), failures=()):
    return doctor.Gpu(0, "a GPU", capability, 141.0, failures=[*failures])


READY, LIMITED, NOT_READY = "Ready", "Ready, with limits", "Not ready"


def rows(*states, note="why"):
    return [doctor.Judged(target.name, state, note) for target, state in zip(TARGETS, states, strict=False)]


# What differs from a machine on which everything works; the verdict, and the lines that begin with it.
CONCLUSIONS = [
    ({}, READY, ["the kernel would run"]),
    ({"gpus": [gpu(), gpu(failures=["float16: ptxas died"])]}, NOT_READY, ["GPU 0 (a GPU) runs the original: float16: ptxas died"]),
    ({"gpus": [gpu((8, 9))]}, READY, ["the kernel", "speed on sm_89 has not been measured. Run `nf4-patch doctor --measure`"]),
    ({"targets": rows(State.OFF)}, NOT_READY, ["why keeps the patch off"]),
    ({"targets": rows(State.PATCHED, State.REFUSED)}, NOT_READY, [f"{TARGETS[1].name} is not patched: why"]),
    ({"targets": rows(*[State.REFUSED] * 2, note="import x fails: no")}, NOT_READY, ["import x fails: no"]),
    ({"targets": rows(State.PATCHED, State.WAITING), "limits": ["a limit"]}, LIMITED, ["a limit"]),
    ({"gpus": [gpu(failures=["no"])], "limits": ["a limit"]}, NOT_READY, ["GPU 0"]),
    ({"releases": {}}, NOT_READY, ["bitsandbytes is not installed"]),
    ({"releases": {"bitsandbytes": "0.42.0"}}, NOT_READY, ["bitsandbytes 0.42.0 is too old: nf4_patch needs >= 0.43"]),
]  # fmt: skip


def test_doctor_without_a_library():
    """Each function of a library that is not installed is absent, whatever else is known about the function."""
    for target in TARGETS:
        status = TargetStatus(target.name, State.WAITING)
        found = doctor.judge(target, "", status, "", Config.read())
        assert found.state is State.ABSENT and found.note == f"{target.library} is not installed"


@pytest.mark.parametrize(("build", "is_tested"), [("", True), ("+cu128", True), ("+cpu", True), (".post1", False)])
def test_a_build_of_a_tested_release_is_tested(build, is_tested):
    target = TARGETS[0]
    release = target.tested[-1] + build
    found = doctor.judge(target, release, TargetStatus(target.name, State.PATCHED), "", Config.read({}))
    assert found.state is State.PATCHED and found.note.startswith("tested with ") is not is_tested


WORKS = doctor.DoctorReport("", {"bitsandbytes": "0.50.2"}, [gpu()], "", rows(State.PATCHED), [], [])


@pytest.mark.parametrize(("changes", "outcome", "verdicts"), CONCLUSIONS)
def test_what_doctor_concludes(changes, outcome, verdicts):
    report = dataclasses.replace(WORKS, **changes)
    assert report.as_dict()["outcome"] == outcome and report.exit_code == (outcome == NOT_READY)
    said = list(report.render())[: len(verdicts)]
    assert all(line.startswith(f"{outcome}: {verdict}") for line, verdict in zip(said, verdicts, strict=True))
    assert sum(str(line).startswith(f"{outcome}: ") for line in report.render()) == len(verdicts)


LINES = {"torch": "2.11.0", "peft": "0.21.0", "transformers": "5.17.0", "unsloth": "2026.10.9"}
IN_TRL, IN_UNSLOTH = advice.SETTINGS, "padding_free=False, pad_to_multiple_of=64"
PACKED, UPGRADE = 'nf4_patch.enable("fast", experts="4bit")', "upgrade to transformers 5.17, peft 0.17 or newer"


@pytest.mark.parametrize(
    ("changes", "capabilities", "settings", "unsloth", "experts"),
    [
        ({}, [(9, 0)], IN_TRL, IN_UNSLOTH, PACKED),
        ({}, [(7, 5), (8, 0)], IN_TRL, IN_UNSLOTH, PACKED),
        ({}, [(7, 5)], None, None, PACKED),  # a T4 does not wait for Python
        ({}, [], None, None, PACKED),
        ({"unsloth": "2026.9.14"}, [(9, 0)], IN_TRL, None, PACKED),
        ({"transformers": "5.5.0"}, [(9, 0)], IN_TRL, IN_UNSLOTH, UPGRADE),
        ({"transformers": "4.51.3"}, [(9, 0)], None, None, UPGRADE),
        ({"peft": "0.15.2"}, [(9, 0)], IN_TRL, IN_UNSLOTH, UPGRADE),
    ],
)
def test_doctor_says_the_line_to_type(changes, capabilities, settings, unsloth, experts):
    lines = doctor.lines_to_type(LINES | changes, [gpu(capability) for capability in capabilities])
    assert lines["to train faster"] == 'nf4_patch.enable("fast")'
    assert lines["or with the same bits"] == "nf4_patch.enable()"
    assert lines.get("also in SFTConfig") == settings and lines["mixtures of experts"] == experts
    assert lines.get("or with Unsloth") == unsloth
    is_old = (7, 5) in capabilities
    assert lines.get("on a T4 or RTX 20 also") == (advice.OLD.also if is_old else None)
    assert lines.get("on a T4 with Unsloth") == ('nf4_patch.enable(activations="auto")' if is_old else None)
    report = dataclasses.replace(WORKS, lines=lines)
    assert '  to train faster:         nf4_patch.enable("fast")' in list(report.render())
    assert "What to type:" not in list(dataclasses.replace(report, no_gpu="none").render())


@pytest.mark.parametrize(
    ("gibibytes", "ends"),
    [
        ([141.0], 'experts="4bit")'),
        ([31.8], 'experts="4bit")'),  # an RTX 5090
        ([22.0], 'cache="off")'),  # an L4
        ([14.6], 'offload="6GiB")'),  # a T4
        ([141.0, 15.6], 'offload="6GiB")'),
        ([11.6], 'offload="3GiB")'),
        ([7.8], 'offload="all")'),
        ([3.9], "does not fit, even with offload"),
    ],
)
def test_doctor_recommends_no_mixture_that_cannot_be_loaded(gibibytes, ends):
    lines = doctor.lines_to_type(LINES, [dataclasses.replace(gpu(), gibibytes=size) for size in gibibytes])
    assert lines["mixtures of experts"].endswith(ends)
    small = "for Qwen3-30B-A3B also" in lines
    assert not ends.endswith('"all")') or "LoRA r = 8" in lines["for Qwen3-30B-A3B also"]
    assert small is (3.9 < min(gibibytes) < 30) and (
        not small or "expandable_segments" in lines["for Qwen3-30B-A3B also"]
    )


def test_a_release_that_does_not_load_the_patch_is_named(monkeypatch):
    monkeypatch.setenv("NF4_PATCH", "1")
    monkeypatch.setattr(doctor, "release_of", lambda name: "0.45.5")
    (line,) = [line for line in doctor.variables_in_force(Config.read()) if "0.45.5" in line]
    assert "`nf4-patch run`" in line


def test_measured_gpus_are_those_of_the_data():
    files = (Path(__file__).parents[2] / "docs" / "data").glob("bench-*.json")
    found = {json.loads(file.read_text())["machine"]["capability"] for file in files}
    assert found == {f"{major}{minor}" for major, minor in doctor.compilation.MEASURED}


@pytest.mark.parametrize(
    ("release", "variables", "measured", "limits"),
    [
        ("2026.10.9", {}, True, 1),
        ("2026.10.9", {}, False, 2),
        ("2026.10.9", {"UNSLOTH_BNB_TRITON": "0"}, False, 0),
        ("2026.9.14", {}, False, 0),
    ],
)
def test_what_unsloth_keeps_for_its_own_kernel(release, variables, measured, limits, monkeypatch):
    """Unsloth's release decides, and Unsloth is not imported.

    Compiled layers run its kernel on every GPU, and eager calls on GPUs that were not measured.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(unsloth, "keeps_eager_calls", lambda: not measured)
    target = next(target for target in TARGETS if target.name == UNSLOTH)
    with nf4_patch.enabled():
        kept = doctor.kept(target, release, State.WAITING)
    assert len(kept) == limits and (unsloth.OWN_KERNEL_ADVICE in kept) is (limits > 0)


@pytest.mark.full
def test_doctor_asks_the_imported_unsloth(tmp_path):
    code = "from nf4_patch.tools.cli import main; main(['doctor', '--unsloth', '--json', 'report.json'])"
    python(code, check=False, cwd=tmp_path, UNSLOTH_ALLOW_CPU="1", CUDA_VISIBLE_DEVICES="", UNSLOTH_BNB_TRITON="1")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [target["state"] for target in report["targets"] if target["name"] == UNSLOTH] == ["patched"]
    assert unsloth.OWN_KERNEL_ADVICE in report["limits"]


@pytest.mark.parametrize(("size", "words", "on"), [("6442450944", " (6 GiB): ", {}), ("6G", ": ", {"NF4_PATCH": "1"})])
def test_doctor_says_what_an_option_needs(size, words, on, patched):
    said = " ".join(output_of("doctor", exit_code=CODE, NF4_PATCH_CACHE=size, **on).split())
    needs = f"NF4_PATCH_CACHE={size}: no effect until NF4_PATCH=1 or nf4_patch.enable()"
    assert f"NF4_PATCH_CACHE={size}{words}" in said and (needs in said) is not bool(on)
    assert nf4_patch.is_enabled()  # as it was


def test_releases():
    for release, condition in (("0.50.2", ">= 0.50"), ("2026.9.12", "<= 2026.9.12"), ("2026.9.13.post1", ">= 2026.9.13"),
                               ("0.50.0.dev0", ">= 0.50")):  # fmt: skip
        assert doctor.holds(release, condition)
    assert not doctor.holds("0.49.2", ">= 0.50") and not doctor.holds("2026.10.1", "<= 2026.9.12")


# verify


@pytest.fixture
def few_cases(monkeypatch):
    """Use one case of each family and dtype."""
    chosen = {}
    for case in cases.every_case():
        chosen.setdefault((case.family, case.dtype), case)
    monkeypatch.setattr(cases, "every_case", lambda: iter(chosen.values()))
    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    return len(chosen)


@pytest.mark.gpu
def test_verify_compares_everything(tmp_path):
    report = report_of(tmp_path, "verify")
    assert report["failures"] == []
    assert sum(row["differing"] for row in report["rows"]) == 0
    pairs = [row for row in report["rows"] if row["family"] == cases.PAIRS]
    assert [row["dtype"] for row in pairs] == ["float16", "bfloat16", "float32"]
    assert all(row["elements"] >= 2 * 65_536 for row in pairs)  # an element a nibble
    assert sum(row["cases"] for row in report["rows"]) == len(list(cases.every_case()))


def test_the_pairs_are_all_there(device):
    case = next(case for case in cases.every_case() if case.family == cases.PAIRS)
    packed, state = cases.quantized(case, 0, device)
    blocks = torch.arange(packed.numel(), device=device) * 2 // case.blocksize
    pairs = state.absmax[blocks].long() * 256 + packed.view(-1).long()
    assert pairs.unique().numel() == 65_536


def test_every_fp4_case_has_both_zeros(device):
    """The zeros are at the beginning and, if a last word is decoded byte by byte, at the end."""
    for case in cases.every_case():
        if case.quant_type == "fp4" and case.family == cases.LAYOUTS and case.dtype is torch.bfloat16:
            packed, state = cases.quantized(case, 0, device)
            assert packed[0] == packed[-1] == 0x80
            zeros = reference.dense(weight_of(packed, state), flush_subnormals=True).view(-1)[:2]
            assert [bool(zero == 0 and torch.signbit(zero)) for zero in zeros] == [True, False][: state.shape.numel()]


@pytest.mark.gpu
def test_verify_finds_a_lost_minus_zero(monkeypatch, tmp_path):
    plant(monkeypatch, lambda weight: weight.add_(0.0))
    report = report_of(tmp_path, "verify", exit_code=1)
    assert report["failures"] and all("bitsandbytes -0.0" in each for each in report["failures"])


def plant(monkeypatch, change):
    """Change the bytes that the kernel wrote."""
    into = launch.Launch.into

    def changed(self, out):
        result = into(self, out)
        change(out)
        return result

    monkeypatch.setattr(launch.Launch, "into", changed)


def flip_one_bit(weight):
    integers = {2: torch.int16, 4: torch.int32}[weight.dtype.itemsize]
    weight.view(-1).view(integers)[-1] ^= 1


def write_not(weight):
    weight.view(-1)[-1:].fill_(float("nan"))


@pytest.mark.every(2)
@pytest.mark.parametrize(("mistake", "on"), [(flip_one_bit, False), (flip_one_bit, True), (write_not, False)])
def test_verify_finds_one_element(mistake, on, few_cases, monkeypatch, tmp_path):
    """This also works while the patch is on, because the oracle is bitsandbytes, not nf4_patch's replacement."""
    plant(monkeypatch, mistake)
    with nf4_patch.enabled() if on else contextlib.nullcontext():
        report = report_of(tmp_path, "verify", exit_code=1)
        assert nf4_patch.is_enabled() is on
    assert len(report["failures"]) == few_cases
    assert [row["differing"] for row in report["rows"]] == [1] * few_cases
    assert "NOT bit-identical" in report["output"]


def test_verify_takes_unsupported_for_a_failure(few_cases, monkeypatch, tmp_path):
    monkeypatch.setattr(direct._dequantizer, "of_state", lambda weight, state, out: Reason.BLOCKSIZE)
    report = report_of(tmp_path, "verify", exit_code=1)
    assert all(f"unsupported: {Reason.BLOCKSIZE.sentence}" in failure for failure in report["failures"])


# The files that a command or the callback writes

MAIN, OTHER = (SimpleNamespace(is_world_process_zero=is_main, log_history=[]) for is_main in (True, False))


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    checked = output.OutputFile().convert
    assert checked("x.json") == tmp_path / "x.json" and checked("/dev/stdout") == Path("/dev/stdout")
    for name, why in (("missing/x.json", "does not exist"), ("file/x.json", "is a file"), ("", "is a directory")):
        with pytest.raises(click.BadParameter, match=why):
            checked(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for name in ("new.json", "file"):
        with pytest.raises(click.BadParameter, match="is not writable"):
            checked(tmp_path / name)


@pytest.mark.parametrize("words", [pytest.param(["doctor"], marks=pytest.mark.full), ["--version"], ["run", "--help"]])
def test_a_full_disk_behind_stdout_is_one_line(words, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nf4_patch", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith("nf4_patch: the output could not be written: No space left on device\n")


def test_the_callback_counts_from_the_beginning_of_training(on):
    """Hits and fallbacks of an earlier training in the process do not count."""
    callback, logs = ReportCallback(), {}
    state = SimpleNamespace(is_world_process_zero=True, log_history=[{"loss": 1.0}])
    for count in (3, 2):
        callback.on_train_begin(None, state, None)
        for _ in range(count):
            counters.of(TARGET, (64, 64), "bfloat16").hits += 2
            counters.fall_back(TARGET, Reason.STATE_FIELDS, strict=False)
        callback.on_log(None, state, None, logs)
    assert logs == {"nf4_patch_hits": 4, "nf4_patch_fallbacks": 2}
    assert state.log_history == [{"loss": 1.0} | logs]


def test_the_callback_checks_its_file_when_training_begins(tmp_path):
    callback = ReportCallback(tmp_path / "missing" / "report.json")
    callback.on_train_begin(None, OTHER, None)  # another process writes it, where the folder may exist
    with pytest.raises(ValueError, match="does not exist"):
        callback.on_train_begin(None, MAIN, None)


def test_the_callback_writes_where_its_file_was_named_and_fails_no_training_at_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    callbacks = [ReportCallback(name, quiet=True) for name in ("there/report.json", "report.json")]
    for callback in callbacks:
        callback.on_train_begin(None, MAIN, None)
    (tmp_path / "there").rmdir()
    monkeypatch.chdir("/")
    for callback in callbacks:
        callback.on_train_end(None, MAIN, None)
    missing = tmp_path / "there" / "report.json"
    assert capsys.readouterr() == ("", f"nf4_patch: {missing} could not be written: No such file or directory\n")
    assert "targets" in json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("faulty", [True, False])
def test_doctor_names_the_fault_of_bitsandbytes_on_this_cpu(monkeypatch, faulty):
    import bitsandbytes  # noqa: F401

    monkeypatch.setattr(doctor.cpu, "misreads_rows", lambda: faulty)
    said = doctor.fault_on_the_cpu()
    assert ("no multiple of the blocksize" in said) is faulty
    report = doctor.DoctorReport("a machine", {}, [], "", [], [], [], cpu=said)
    assert (said in list(report.render())) is faulty or not faulty
