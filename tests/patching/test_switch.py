"""On and off: imports, environment, enable(), disable() and enabled()."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import os
import sys
import typing
import weakref
from pathlib import Path

import bitsandbytes.functional as F
import pytest
import torch
from alternation import thinned
from run_example import completed
from subprocess_python import program, python
from torch.utils import swap_tensors as swap

import nf4_patch
from nf4_patch.cache.store import cache
from nf4_patch.graphs.shapes import Graphs
from nf4_patch.moe import launch
from nf4_patch.nf4 import runtime
from nf4_patch.options import OPTIONS
from nf4_patch.patching import placement
from nf4_patch.patching.config import VARIABLES, Config, ConfigError
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.option import size_in_words
from nf4_patch.patching.switch import switch
from nf4_patch.patching.targets import TARGETS

NONE = placement.Installed(TARGETS[0])


def test_import_and_switching_are_cheap_and_silent():
    done = program("import_is_cheap", fresh=True)
    assert done.stdout == done.stderr == ""


@pytest.mark.every(2)
@pytest.mark.parametrize("order", ["enabled-first", "enabled-last"])
def test_either_import_order(order):
    program("import_order", order, interpreted=True)


@pytest.fixture
def entry_point():
    if not importlib.metadata.entry_points(group="bitsandbytes.backends", name="nf4_patch"):
        assert not os.environ.get("CI"), "the package is on the path but not installed"
        pytest.skip("nf4_patch is not installed: no entry point")


PATCHED = "hasattr(bitsandbytes.functional.dequantize_4bit, '__wrapped__')"


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("code", "variables", "said"),
    [
        (f"import bitsandbytes; assert {PATCHED}", {"NF4_PATCH": "1"}, "is on: NF4_PATCH=1, NF4_PATCH_CACHE=6GiB"),
        ("import nf4_patch, bitsandbytes; nf4_patch.enable()", {"NF4_PATCH": "1", "RANK": "0"}, "is on: NF4_PATCH=1"),
        ("import bitsandbytes", {"NF4_PATCH": "1", "RANK": "1", "LOCAL_RANK": "0"}, ""),
        ("import nf4_patch as n; n.disable(); import bitsandbytes; assert not n.is_enabled()", {"NF4_PATCH": "1"}, ""),
        ("import nf4_patch as n; assert n.is_enabled()", {"NF4_PATCH": "1"}, ""),  # there is nothing to patch
        ("import bitsandbytes", {}, "NF4_PATCH_CACHE=6GiB: no effect, because neither NF4_PATCH=1 nor enable()"),
        ("import bitsandbytes, nf4_patch; nf4_patch.enable(); nf4_patch.disable()", {}, ""),
        (f"import bitsandbytes; assert not {PATCHED}", {"NF4_PATCH": "0"}, ""),
        ("import bitsandbytes, logging; logging.getLogger('nf4_patch').setLevel('ERROR')", {}, ""),
        ("import nf4_patch", {}, ""),
    ],
)
def test_what_the_environment_did_is_one_line_of_the_log(entry_point, code, variables, said):
    done = python(code, NF4_PATCH_CACHE="6GiB", **variables)
    lines = [line for line in done.stderr.splitlines() if "NF4_PATCH" in line]
    assert len(lines) == bool(said) and said in done.stderr and done.stdout == ""


@pytest.mark.full
@pytest.mark.parametrize("words", [(), ("-m", "nf4_patch", "run")], ids=str)
def test_a_mixture_is_packed_by_the_environment_alone(words, entry_point, tmp_path, monkeypatch):
    """transformers is the first to import bitsandbytes, in the middle of the module that will be patched."""
    pytest.importorskip("transformers", minversion="5.17")  # older ones pack no experts while they load
    import tiny_experts

    monkeypatch.setattr(launch, "supports", runtime.runs_on)  # the kernels, as in the other processes
    tiny_experts.saved(tiny_experts.random_model("qwen3"), tmp_path / "model")
    nf4_patch.enable(experts="4bit")
    config = tiny_experts.in_4bit(llm_int8_skip_modules=["lm_head"])
    model = tiny_experts.loaded(tmp_path / "model", quantization_config=config)
    with torch.no_grad():
        loss = model(input_ids=tiny_experts.ids_of(), labels=tiny_experts.ids_of()).loss.item()
    packed = str(2 * tiny_experts.LAYERS)
    name = Path(__file__).parents[1] / "programs" / "experts_by_environment.py"
    variables = {"NF4_PATCH_EXPERTS": "4bit"} | ({} if words else {"NF4_PATCH": "1"})
    done = completed((sys.executable, *words, name, tmp_path / "model"), tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [packed, str(loss)]


def standing():
    """Return the current function at each replaced place: in the module, class or dict that should hold it.

    None means inherited.
    """
    found = {}
    for target in TARGETS:
        holder, name = target.holder(sys.modules.get(target.module))
        if holder is not None:
            held = (holder if isinstance(holder, dict) else vars(holder)).get(name)
            found[target.name] = getattr(held, "__func__", held)
    return found


@pytest.mark.full
def test_every_function_is_replaced_while_its_option_is_on_and_put_back():
    for module in ("transformers.integrations.moe", "transformers.quantizers.auto", "peft.tuners.lora.layer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with nf4_patch.enabled():  # what is imported late is in place
        pass
    originals = standing()
    every = {name: option.on for name, option in OPTIONS.items()}
    for options in ({}, *({name: value} for name, value in every.items()), every):
        with nf4_patch.enabled(**options):
            now = standing()
            assert now.keys() == originals.keys()
            for target in TARGETS:
                if target.name in now and placement.installed.get(target.name, NONE).replacement is not None:
                    wanted = not target.option or target.option in options or target.or_option in options
                    if target.permanent:  # in place before and after
                        assert now[target.name] is placement.installed[target.name].replacement
                        continue
                    assert (now[target.name] is not originals[target.name]) == wanted, target.name
        assert standing() == originals
    assert "resize_" not in vars(torch.UntypedStorage)  # inherited, as before the first time


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_every_variable_has_a_default_that_it_allows(variable):
    assert variable.default in ("", *variable.allowed)
    for value in variable.allowed:
        Config.read({variable.name: value})
        Config.read({variable.name: value.upper()})


def test_every_option_is_an_argument_and_a_gate():
    """An option is one row of the table and one argument in each of the two signatures."""
    for function in (nf4_patch.enable, nf4_patch.enabled):
        arguments = inspect.signature(function).parameters
        assert [*arguments] == ["profile", *OPTIONS] and {argument.default for argument in arguments.values()} == {None}
        assert {arguments[name].kind for name in OPTIONS} == {inspect.Parameter.KEYWORD_ONLY}
    assert (
        switch.gates.keys() == {"", "always", *OPTIONS} and {target.option for target in TARGETS} <= switch.gates.keys()
    )
    assert set(OPTIONS.values()) <= set(VARIABLES)
    reports = {field.name for field in dataclasses.fields(nf4_patch.Status)}
    for name, option in OPTIONS.items():
        assert option.argument == name and set(option.targets) <= set(TARGETS)
        assert (option.report is None) is (option.lines is None) is (name not in reports)
        assert option.option and option.default == "off" and Config.read({}, **{name: option.on}).options[name] != "off"


@pytest.mark.parametrize(("true", "false"), [("1", "0"), ("true", "false"), ("Yes", "No"), ("ON", "OFF")])
def test_usual_spellings_of_true_and_false(true, false):
    assert Config.read({"NF4_PATCH": true}).requested
    assert Config.read({"NF4_PATCH_STRICT": true}).strict
    assert not Config.read({"NF4_PATCH_STRICT": false}).strict
    assert Config.read({"NF4_PATCH": false}).forbidden
    assert Config.read({"NF4_PATCH": true, "NF4_USE_TRITON": false}).forbidden
    assert not Config.read({"NF4_USE_TRITON": true}).forbidden
    assert Config.read({"NF4_PATCH": true, "NF4_USE_TRITON": false}).requested


def test_while_the_patch_is_kept_off_wrong_variables_do_not_matter(monkeypatch):
    monkeypatch.setenv("NF4_PATCH", "0")
    monkeypatch.setenv("NF4_PATCH_CACHE", "banana")
    assert not nf4_patch.enable() and not nf4_patch.enable("fast") and not nf4_patch.is_enabled()
    with pytest.raises(ConfigError, match="cache='banana'"):
        nf4_patch.enable(cache="banana")


def test_an_unknown_value_says_so_in_one_line_and_never_breaks_an_import():
    with pytest.raises(ConfigError, match=r"NF4_PATCH='banana' is not allowed. Allowed: 0, 1"):
        Config.read({"NF4_PATCH": "banana"})
    for code in ("import nf4_patch", "import nf4_patch, bitsandbytes"):
        done = python(f"{code}; assert not nf4_patch.is_enabled()", NF4_PATCH="2")
        lines = [line for line in done.stderr.splitlines() if "NF4_PATCH" in line]
        assert len(lines) == 1 and lines[0].startswith(
            "nf4_patch stays off: NF4_PATCH='2' is not allowed. Allowed: 0, 1"
        )
    done = python("import nf4_patch; nf4_patch.enable()", NF4_PATCH_STRICT="perhaps", check=False)
    assert "Allowed: 0, 1" in done.stderr


@pytest.mark.parametrize(
    ("given", "read", "words"),
    [("off", "off", ""), ("AUTO", "auto", ""), ("6GiB", 6 * 2**30, "6 GiB"), ("6G", 6 * 2**30, "6 GiB"),
     (" 6 GiB ", 6 * 2**30, "6 GiB"), ("6g", 6 * 2**30, "6 GiB"), ("6GB", 6 * 10**9, "6 GB"),
     ("1.5 gb", 1_500_000_000, "1.5 GB"), ("1.5G", 3 * 2**29, "1.5 GiB"), ("500MB", 500_000_000, "500 MB"),
     ("512M", 2**29, "512 MiB"), (6442450944, 6 * 2**30, "6 GiB"), ("1000000", 10**6, "1 MB"), ("64 KiB", 65536, "64 KiB"),
     ("10B", 10, "10 B"), (123_456_789, 123_456_789, "118 MiB"), (1692 * 2**20, 1692 * 2**20, "1692 MiB"), (5826240 * 2**10, 5826240 * 2**10, "5.56 GiB"), (1_073_000_001, 1_073_000_001, "1020 MiB"), (None, "off", ""), (0, "off", ""), ("0", "off", ""),
     ("0GiB", "off", "")],
)  # fmt: skip
def test_sizes_of_the_cache(given, read, words):
    """Try sizes as an argument, as a variable, and as text for people."""
    assert Config.read({}, cache=given).options["cache"] == read
    assert Config.read({"NF4_PATCH_CACHE": str(given or "")}).options["cache"] == read
    assert not words or size_in_words(read) == words


SIZES = r"is not allowed. Allowed: off, auto, a size \(6GiB or 6G .*, or {unset}"
REFUSED = {  # an option: what it is given, and what the error says
    "matmul": [(given, "is not allowed. Allowed: off, auto, or {unset}") for given in (1, "always", ("auto",))],
    "experts": [(given, "is not allowed. Allowed: off, 4bit, or {unset}") for given in (4, "8bit")],
    "cache": [
        *[(given, SIZES) for given in ("6 gigs", "-1", "GiB", "all", "1e9", "9" * 400, "9" * 5000, str(2**63))],
        *[(given, SIZES) for given in (-1, True, 2**63, float("inf"), b"6GiB")],
        *[
            (given, rf"would mean {given} bytes\. Write {given}GiB, {given}MiB or {given}B")
            for given in (6, "6", "6.5", 6.5, 999_999)
        ],
    ],
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_an_option_does_not_allow(option):
    """Try an argument, also of a block, and a variable.

    The error is one line that lists the allowed values, and the patch stays off.
    """
    for given, words in REFUSED[option]:
        said = f"=.*{words}".replace("{unset}", "None")
        with pytest.raises(ConfigError, match=f"^{option}{said}") as error:
            nf4_patch.enable(**{option: given})
        assert len(str(error.value)) < 500
        with pytest.raises(ConfigError, match=f"^{option}{said}"), nf4_patch.enabled(**{option: given}):
            pass
        if isinstance(given, str):
            variable = f"NF4_PATCH_{option.upper()}"
            with pytest.raises(ConfigError, match=f"^{variable}{said.replace('None', 'unset')}"):
                Config.read({variable: given})
    assert not nf4_patch.is_enabled()


def in_force():
    """Return the options as the user set them, and as the code that depends on them sees them."""
    assert all(switch.gates[name].on == (switch.value(name) != "off") for name in OPTIONS)
    assert cache.mode == switch.value("cache")
    return {name: switch.value(name) for name in OPTIONS}


OFF = dict.fromkeys(OPTIONS, "off")
SIZE = 2**20


@pytest.mark.every(2)
@pytest.mark.parametrize("option", thinned(OPTIONS, 2))
def test_an_option_as_argument_and_as_variable(option, monkeypatch):
    """The argument has precedence, then the value in force, then the variable, which counts again after disable()."""
    name, on = OPTIONS[option].name, Config.read({}, **{option: OPTIONS[option].on}).options[option]
    monkeypatch.delenv(name, raising=False)
    given = OPTIONS[option].on
    for variable, argument, wanted in (
        ("", None, "off"), (given, None, on), (given, "off", "off"), ("off", given, on), (given.upper(), None, on)
    ):  # fmt: skip
        monkeypatch.setenv(name, variable)
        assert nf4_patch.enable(**{option: argument})
        assert in_force() == OFF | {option: wanted}, (variable, argument)
        monkeypatch.setenv(name, "off" if wanted == on else given)
        nf4_patch.enable()
        assert in_force() == OFF | {option: wanted}
        nf4_patch.disable()
        assert in_force() == OFF


@pytest.mark.every(2)
@pytest.mark.parametrize("option", thinned(OPTIONS, 2))
def test_an_option_that_is_not_named_stays(option, monkeypatch):
    """This holds for a second call and for a block, for every option, even if the option's variable was changed to
    nonsense meanwhile.
    """
    for each in OPTIONS.values():
        monkeypatch.delenv(each.name, raising=False)
    every = {name: each.on for name, each in OPTIONS.items()} | {"cache": SIZE, "offload": SIZE}
    nf4_patch.enable(**every)
    for each in OPTIONS.values():
        monkeypatch.setenv(each.name, "nonsense")
    nf4_patch.enable()
    assert in_force() == every
    without = every | {option: "off"}
    with nf4_patch.enabled(**{option: "off"}):
        assert in_force() == without
        with nf4_patch.enabled():
            assert in_force() == without
    assert in_force() == every
    nf4_patch.enable(**{option: "off"})
    assert in_force() == without
    with nf4_patch.enabled(**{option: every[option]}):
        assert in_force() == every
    assert in_force() == without


def test_the_cache_is_left_alone_where_it_is_not_named(device):
    packed, state = F.quantize_4bit(torch.randn(64, 64, device=device), quant_type="nf4", compress_statistics=True)
    packed = torch.nn.Parameter(packed, requires_grad=False)
    cached = functools.partial(Dequantizer("a test").of_state, packed, state, only_read=True)
    nf4_patch.enable(cache="1MiB")
    kept = cached()
    with nf4_patch.enabled(matmul="auto"):
        assert cached() is kept
    nf4_patch.enable()
    nf4_patch.enable(matmul="auto", experts="4bit")
    assert cached() is kept
    with nf4_patch.enabled(cache="off"):
        assert cached() is not kept and not cache.weights
    assert len(cache.weights) == 0 and cached() is cached()  # empty, and on again


class Holder:
    swap = staticmethod(torch.utils.swap_tensors)


SWAPS = {
    "PyTorch's name": lambda a, b: torch.utils.swap_tensors(a, b),
    "another name": swap,
    "a class": Holder.swap,
    "a partial": functools.partial(torch.utils.swap_tensors),
    "a default": lambda a, b, function=torch.utils.swap_tensors: function(a, b),
}


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
def test_a_swap_by_a_name_that_was_taken_before(swap, device):
    """PyTorch refuses a tensor with weak references, so the cache drops its references to a parameter and its scales in time."""
    stock = torch.utils.swap_tensors, weakref.getweakrefs
    nf4_patch.enable(cache="1MiB")
    weights = [torch.randn(64, 64, device=device) for _ in range(2)]
    layers = [F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True) for weight in weights]
    parameters = [torch.nn.Parameter(packed, requires_grad=False) for packed, _ in layers]
    read = functools.partial(Dequantizer("a test").of_state, only_read=True)
    dense = [read(packed, state).clone() for packed, (_, state) in zip(parameters, layers, strict=True)]
    assert len(cache.weights) == 2
    scales = [state.absmax for _, state in layers]
    swap(*parameters)
    assert not cache.snapshot().weights
    again = [read(packed, state) for packed, (_, state) in zip(parameters[::-1], layers, strict=True)]
    assert all(torch.equal(ours, before) for ours, before in zip(again, dense, strict=True))
    swap(*scales)
    swap(*parameters)
    again = [read(packed, state) for packed, (_, state) in zip(parameters, layers, strict=True)]
    reference = [weakref.ref(parameter) for parameter in parameters]
    with pytest.raises(RuntimeError, match="weakref"):  # somebody else's
        swap(*parameters)
    del reference
    nf4_patch.disable()
    assert (torch.utils.swap_tensors, weakref.getweakrefs) == stock


def test_a_trained_parameter_of_a_graphed_layer_is_swapped():
    graphs, layer = Graphs(), torch.nn.Linear(2, 2)
    graphs.claim(layer)
    nf4_patch.enable()
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.ones(2, 2)))
    assert [*graphs.holders[layer.weight]] == [layer]


def test_a_block_ends_as_it_began_and_raises_nothing_of_its_own(monkeypatch):
    """The environment may change meanwhile.

    The user's exception is raised, also from a block that ends before a block inside it.
    """
    before = {"cache": SIZE}
    nf4_patch.enable(**before)
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)

    def of_the_user():
        with nf4_patch.enabled(matmul="auto"):
            monkeypatch.setenv("NF4_PATCH_MATMUL", "nonsense")
            monkeypatch.setenv("NF4_PATCH_STRICT", "nonsense")
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        of_the_user()
    assert in_force() == OFF | before and not switch.strict
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    first, second, third = (
        nf4_patch.enabled(matmul="auto"),
        nf4_patch.enabled(experts="4bit"),
        nf4_patch.enabled(cache=0),
    )
    for block in (first, second, third):
        block.__enter__()
    assert in_force() == OFF | {"matmul": "auto", "experts": "4bit"} and switch.strict
    second.__exit__(None, None, None)
    assert in_force() == OFF | {"matmul": "auto", "experts": "4bit"}
    third.__exit__(None, None, None)
    assert in_force() == OFF | before | {"matmul": "auto"}
    first.__exit__(None, None, None)
    assert in_force() == OFF | before and not switch.strict
    with nf4_patch.enabled(matmul="auto"):
        nf4_patch.disable()
    assert in_force() == OFF | before
    first, second = nf4_patch.enabled(), nf4_patch.enabled(matmul="auto")
    first.__enter__(), second.__enter__(), first.__exit__(None, None, None)
    assert in_force() == OFF | before | {"matmul": "auto"}
    second.__exit__(None, None, None)
    assert in_force() == OFF | before


def test_the_literals_of_enable_are_the_values_of_the_table():
    hints = typing.get_type_hints(nf4_patch.enable)
    assert hints == typing.get_type_hints(nf4_patch.enabled.__wrapped__) | {"return": bool}
    for name, variable in OPTIONS.items():
        allowed = [str, int] if variable.size else [typing.Literal[variable.allowed], bool]
        assert hints[name] == typing.Union[(*allowed, None)], name


USER = """
from nf4_patch import ConfigError, FallbackError, StaleWeightError, Status, enable, enabled, status

enable(matmul="auto", cache="6GiB", experts="4bit", lora="fused")
with enabled(cache=0, matmul=None):
    found: Status = status()
    hits: int = found.hits
errors: tuple[type[Exception], ...] = (ConfigError, FallbackError, StaleWeightError)
"""


@pytest.mark.full
def test_a_users_program_type_checks_strictly(tmp_path):
    (tmp_path / "user.py").write_text(USER + 'enable(lora="fusd")\n')
    config = f"[mypy]\nstrict = true\nfollow_imports = silent\nmypy_path = {Path(nf4_patch.__file__).parents[1]}\n"
    (tmp_path / "mypy.ini").write_text(config + "[mypy-torch.*]\nfollow_imports = skip\n")
    done = completed((sys.executable, "-m", "mypy", "user.py"), tmp_path)
    assert done.stdout.splitlines()[-1].startswith("Found 1 error") and "\"Literal['fusd']\"" in done.stdout, done
    exec(USER, {})
    nf4_patch.disable()
