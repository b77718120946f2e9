"""On and off: imports, environment, enable(), disable() and enabled()."""

from __future__ import annotations

import importlib.metadata
import os

import bitsandbytes.functional as F
import pytest
from subprocess_python import program, python

import nf4_patch
from nf4_patch.config import VARIABLES, Config, ConfigError
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch


def test_import_and_switching_are_cheap_and_silent():
    done = program("import_is_cheap", fresh=True)
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("order", ["enabled-first", "enabled-last"])
def test_either_import_order(order):
    program("import_order", order, interpreted=True)


def test_environment_enables_with_no_change_of_code():
    if not importlib.metadata.entry_points(group="bitsandbytes.backends", name="nf4_patch"):
        assert not os.environ.get("CI"), "the package is on the path but not installed"
        pytest.skip("nf4_patch is not installed: no entry point")
    code = 'import bitsandbytes.functional as F; print(hasattr(F.dequantize_4bit, "__wrapped__"))'
    assert python(code, NF4_PATCH="1").stdout.split() == ["True"]
    assert python(code).stdout.split() == ["False"]
    assert python("import nf4_patch; print(nf4_patch.is_enabled())", NF4_PATCH="1").stdout.split() == ["True"]


@pytest.mark.parametrize(
    "off", [{"NF4_PATCH": "0"}, {"NF4_USE_TRITON": "0"}, {"NF4_PATCH": "1", "NF4_USE_TRITON": "0"}]
)
def test_environment_off_always_wins(off):
    code = """
    import nf4_patch
    assert nf4_patch.enable() is False
    import bitsandbytes.functional as F
    assert not hasattr(F.dequantize_4bit, "__wrapped__")
    assert not nf4_patch.is_enabled()
    """
    python(code, **off)


def test_enable_turns_off_what_the_environment_forbids(on, monkeypatch):
    monkeypatch.setenv("NF4_PATCH", "0")
    assert nf4_patch.enable() is False
    assert not nf4_patch.is_enabled()
    assert not hasattr(F.dequantize_4bit, "__wrapped__")


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_every_variable_has_a_default_that_it_allows(variable):
    assert variable.default in ("", *variable.allowed)
    for value in variable.allowed:
        Config.read({variable.name: value})
        Config.read({variable.name: value.upper()})


@pytest.mark.parametrize(("true", "false"), [("1", "0"), ("true", "false"), ("Yes", "No"), ("ON", "OFF")])
def test_usual_spellings_of_true_and_false(true, false):
    assert Config.read({"NF4_PATCH": true}).requested
    assert Config.read({"NF4_PATCH_STRICT": true}).strict
    assert not Config.read({"NF4_PATCH_STRICT": false}).strict
    assert Config.read({"NF4_PATCH": false}).forbidden
    assert Config.read({"NF4_PATCH": true, "NF4_USE_TRITON": false}).forbidden
    assert not Config.read({"NF4_USE_TRITON": true}).forbidden


def test_an_unknown_value_says_so_in_one_line_and_never_breaks_an_import():
    with pytest.raises(ConfigError, match=r"NF4_PATCH='banana' is not known; allowed: 0, 1"):
        Config.read({"NF4_PATCH": "banana"})
    for code in ("import nf4_patch", "import nf4_patch, bitsandbytes"):
        done = python(f"{code}; assert not nf4_patch.is_enabled()", NF4_PATCH="2")
        lines = [line for line in done.stderr.splitlines() if "NF4_PATCH" in line]
        assert len(lines) == 1 and lines[0].startswith("nf4_patch stays off: NF4_PATCH='2' is not known; allowed: 0, 1")
    done = python("import nf4_patch; nf4_patch.enable()", NF4_PATCH_STRICT="perhaps", check=False)
    assert "allowed: 0, 1" in done.stderr


def test_the_first_fallback_reaches_a_user_without_logging():
    done = python("""
    import contextlib
    import bitsandbytes.functional as F, nf4_patch, torch
    packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
    state.absmax = state.absmax.double()
    nf4_patch.enable()
    for _ in range(2):
        with contextlib.suppress(Exception):
            F.dequantize_4bit(packed, state)
    """, interpreted=True)  # fmt: skip
    assert done.stderr.count(Reason.STATE_FIELDS.sentence) == 1


@pytest.mark.parametrize("matmul", [True, 1, "always", ("auto",)], ids=repr)
def test_enable_names_what_matmul_may_be(matmul):
    with pytest.raises(ConfigError, match=r"off.*auto"):
        nf4_patch.enable(matmul)
    with pytest.raises(ConfigError), nf4_patch.enabled(matmul):
        pass
    with nf4_patch.enabled():
        assert nf4_patch.is_enabled()
    assert not nf4_patch.is_enabled()


def test_nested_blocks_restore_what_each_found():
    with nf4_patch.enabled("auto"):
        with nf4_patch.enabled("off"):
            assert switch.matmul == "off"
        assert nf4_patch.is_enabled() and switch.matmul == "auto"
        nf4_patch.disable()
    assert not nf4_patch.is_enabled()
    nf4_patch.enable("auto")
    with nf4_patch.enabled("off"):
        assert switch.matmul == "off"
    assert nf4_patch.is_enabled() and switch.matmul == "auto"
    nf4_patch.disable()
    with nf4_patch.enabled():
        pass
    assert not nf4_patch.is_enabled()
    assert not hasattr(F.dequantize_4bit, "__wrapped__")


def test_public_names():
    assert set(nf4_patch.__all__) >= {
        "enable", "disable", "is_enabled", "enabled", "status", "dequantize_nf4", "triton_dequantize_nf4",
    }  # fmt: skip
    assert all(getattr(nf4_patch, name).__doc__ for name in nf4_patch.__all__)


@pytest.mark.parametrize(
    ("given", "read"),
    [("off", "off"), ("BLOCK", "block"), ("6GiB", 6 * 2**30), ("1.5 gb", 1_500_000_000), ("500MB", 500_000_000),
     ("1024", 1024), (4096, 4096), ("64 KiB", 65536), ("10B", 10), (None, "off")],
)  # fmt: skip
def test_sizes_of_the_cache(given, read):
    assert Config.read({}, cache=given).cache == read


@pytest.mark.parametrize("given", ["6 gigs", "-1", "0", "GiB", "auto", "1e9"])
def test_an_invalid_size_of_the_cache_is_an_error_that_lists_the_allowed(given):
    with pytest.raises(ConfigError, match=r"NF4_PATCH_CACHE='.*' is not known; allowed: off, block, a size in bytes"):
        Config.read({"NF4_PATCH_CACHE": given})
