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

MAIN = SimpleNamespace(is_world_process_zero=True, log_history=[])
OTHER = SimpleNamespace(is_world_process_zero=False, log_history=[])


def bad_paths(folder: Path) -> list[tuple[Path, str]]:
    (folder / "file").write_text("")
    return [
        (folder / "missing" / "x.json", "there is no folder"),
        (folder / "file" / "x.json", "there is no folder"),
        (folder, "is a folder"),
    ]


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    for path, why in bad_paths(tmp_path):
        with pytest.raises(output.OutputError, match=why):
            output.checked(path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for path in (tmp_path / "new.json", tmp_path / "file"):
        with pytest.raises(output.OutputError, match="no permission"):
            output.checked(path)


def test_a_path_stays_where_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = output.checked("x.json")
    monkeypatch.chdir("/")
    assert file == tmp_path / "x.json" and not file.exists()
    assert output.checked("/dev/stdout") == Path("/dev/stdout")


def test_a_failed_write_is_one_line(tmp_path, capsys):
    def writer(file):
        raise OSError(28, "No space left on device")

    assert output.write(tmp_path / "x.json", writer) is False
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert f"{tmp_path / 'x.json'} was not written: No space left on device" in said.err


@pytest.mark.parametrize("words", [["doctor", "--json"], ["bench", "--json"], ["run", "--json"]])
def test_a_command_checks_its_files_before_the_work(words, tmp_path):
    verb, *script, option = words
    assert "there is no folder" in output_of(verb, option, tmp_path / "missing" / "x", *script, exit_code=2)


def test_the_callback_checks_its_file_when_training_begins(tmp_path):
    callback = ReportCallback(tmp_path / "missing" / "report.json")
    callback.on_train_begin(None, OTHER, None)  # another process writes it, where the folder may exist
    with pytest.raises(ValueError, match="there is no folder"):
        callback.on_train_begin(None, MAIN, None)


def test_the_callback_never_fails_a_training_that_ends(tmp_path, monkeypatch, capsys):
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
