"""The files that a command writes: a bad path is named before the work, a failed write loses nothing after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from verbs import output_of

from nf4_patch.callback import ReportCallback
from nf4_patch.tools import output

MAIN, OTHER = (SimpleNamespace(is_world_process_zero=is_main, log_history=[]) for is_main in (True, False))


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert output.checked("x.json") == tmp_path / "x.json" and output.checked("/dev/stdout") == Path("/dev/stdout")
    for name, why in (("missing/x.json", "no folder"), ("file/x.json", "no folder"), ("", "is a folder")):
        with pytest.raises(output.OutputError, match=why):
            output.checked(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for name in ("new.json", "file"):
        with pytest.raises(output.OutputError, match="no permission"):
            output.checked(tmp_path / name)


def test_a_failed_write_is_one_line(tmp_path, capsys):
    def writer(file):
        raise OSError(28, "No space left on device")

    assert output.write(tmp_path / "x.json", writer) is False
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"nf4_patch: {tmp_path / 'x.json'} was not written: No space left on device\n"


@pytest.mark.parametrize("verb", ["doctor", "bench", "run"])
def test_a_command_checks_its_file_before_the_work(verb, tmp_path):
    assert "there is no folder" in output_of(verb, "--json", tmp_path / "missing" / "x", exit_code=2)


def test_the_callback_checks_its_file_when_training_begins(tmp_path):
    callback = ReportCallback(tmp_path / "missing" / "report.json")
    callback.on_train_begin(None, OTHER, None)  # another process writes it, where the folder may exist
    with pytest.raises(ValueError, match="there is no folder"):
        callback.on_train_begin(None, MAIN, None)


def test_the_callback_writes_where_its_file_was_named_and_never_fails_a_training_that_ends(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    callbacks = [ReportCallback(name, quiet=True) for name in ("there/report.json", "report.json")]
    for callback in callbacks:
        callback.on_train_begin(None, MAIN, None)
    (tmp_path / "there").rmdir()
    monkeypatch.chdir("/")
    for callback in callbacks:
        callback.on_train_end(None, MAIN, None)
    assert capsys.readouterr().err.count("was not written") == 1
    assert "targets" in json.loads((tmp_path / "report.json").read_text())
