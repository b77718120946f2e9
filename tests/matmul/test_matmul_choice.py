"""The config of each size, without a GPU. It comes from the table or from a measurement, and never changes."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import matmul_reference
import pytest
import torch
from oracle import layout_of, quantized

import nf4_patch
from nf4_patch.matmul import choice, launch, measurement, product
from nf4_patch.matmul.measurement import Measurement
from nf4_patch.matmul.option import MatmulStatus
from nf4_patch.matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS
from nf4_patch.nf4 import runtime
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools import doctor

ADA, HOPPER = (8, 9), (9, 0)
GEMM = "bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl"
SHAPE = 4096, 4096


class Machine:
    """A GPU without a table. ``measured`` lists the measurements, which ``answer`` replaces."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.measured, self.capability = monkeypatch, [], ADA
        self.answer = lambda configs: Measurement(configs[0], {"fused matmul": 10.0, "dequantize + matmul": 20.0})
        monkeypatch.setattr(choice, "_configs", {})
        monkeypatch.setattr(choice, "measurements", {})

    def measure(self, device, first, last, n, k, configs, originals):
        self.measured.append((device, first, last, n, k))
        return self.answer(configs)

    def configs(self, *rows, shape=SHAPE, device=0, **may_measure):
        return [choice.config_for(device, m, *shape, **may_measure) for m in rows]


@pytest.fixture
def machine(monkeypatch):
    found = Machine(monkeypatch)
    monkeypatch.setattr(runtime, "capability_of", lambda device: found.capability)
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 128)
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    monkeypatch.setattr(choice, "measure", found.measure)
    return found


def test_a_range_of_rows_is_measured_once(machine):
    first, *others = machine.configs(3, 4, 3)
    assert first in choice.candidates(4, *SHAPE, 128) and others == [first, first]
    assert machine.measured == [(0, 3, 4, *SHAPE)]
    machine.configs(1, 2, 5, 8, 9, 64)
    assert [(low, high) for _, low, high, *_ in machine.measured[1:]] == [(1, 1), (2, 2), (5, 8), (9, 16), (49, 64)]
    machine.configs(8, shape=(1024, 4096))
    machine.configs(8, device=1)
    assert [(device, n) for device, *_, n, _ in machine.measured[6:]] == [(0, 1024), (1, 4096)]


def test_every_number_of_rows_is_in_a_range_and_the_table_knows_no_finer_ones():
    assert choice.LAST_ROWS[-1] == max(row.max_m for row in SMALL_M_ROWS)
    assert {row.max_m for row in SMALL_M_ROWS + SMALL_M_CANDIDATES} <= set(choice.LAST_ROWS)


def test_where_the_original_is_faster_it_runs(machine):
    machine.answer = lambda configs: Measurement(None, {"fused matmul": 30.0, "dequantize + matmul": 20.0})
    assert machine.configs(8, 5) == [None, None] and len(machine.measured) == 1


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.fixture(params=["training", "capture", "trace", "dispatch mode", "backward"])
def unfit(request, machine, monkeypatch):
    """Return a function that asks for configs in a state in which nothing may be measured."""
    kind = request.param

    def configs(*rows):
        if kind == "training":
            return machine.configs(*rows, may_measure=False)
        if kind == "dispatch mode":
            with Mode():
                return machine.configs(*rows)
        if kind == "backward":
            answers = []
            x = torch.ones(1, requires_grad=True)
            y = x * 2
            y.register_hook(lambda gradient: answers.extend(machine.configs(*rows)))
            y.sum().backward()
            return answers
        with monkeypatch.context() as patch:
            if kind == "capture":
                patch.setattr(runtime, "is_capturing", lambda: True)
            if kind == "trace":
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            return machine.configs(*rows)

    return configs


def test_nothing_is_measured_in_training_captures_traces_or_backwards_and_the_answer_stands(machine, unfit):
    assert unfit(8) == [None] and not machine.measured
    assert machine.configs(8) == [None] and not machine.measured  # a recompute has to agree with its forward
    (config,) = machine.configs(7)  # of the same range, but another matmul
    assert config is not None
    assert unfit(6) == [config] and unfit(8) == [None]  # what is measured serves everywhere


def test_where_a_table_or_the_kernel_decides_nothing_is_measured(machine):
    assert machine.configs(65) == machine.configs(8, shape=(4096, 4104)) == [None]
    machine.capability = HOPPER
    wanted = [launch.config_for(HOPPER, m, *SHAPE, 128) for m in (1, 17, 64, 65)]
    assert machine.configs(1, 17, 64, 65) == wanted and None not in wanted[:3]
    machine.capability = (7, 0)
    assert machine.configs(9) == [None] and not machine.measured


def test_a_measurement_that_cannot_be_made_is_not_repeated(machine):
    machine.answer = lambda configs: None  # too little memory
    assert machine.configs(8, 8) == [None, None]

    def fail(configs):
        raise ZeroDivisionError

    machine.answer = fail
    with pytest.raises(ZeroDivisionError):
        machine.configs(16)
    assert machine.configs(16, 16) == [None, None]
    assert len(machine.measured) == 2


def test_an_interrupt_leaves_the_size_undecided(machine):
    answer = machine.answer

    def interrupt(configs):
        raise KeyboardInterrupt

    machine.answer = interrupt
    with pytest.raises(KeyboardInterrupt):
        machine.configs(8)
    machine.answer = answer
    assert machine.configs(8) != [None] and len(machine.measured) == 2


def test_threads_get_one_answer(machine):
    together = threading.Barrier(8)

    def ask(m):
        together.wait()
        return machine.configs(m)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [5, 6, 7, 8] * 2))
    assert len(machine.measured) == 1 and all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("error", [runtime.KernelUnavailable, torch.cuda.OutOfMemoryError])
def test_where_nothing_compiles_or_memory_ends_the_original_runs(machine, error):
    def fail(configs):
        raise error("no")

    machine.answer = fail
    assert machine.configs(8, 8) == [None, None] and len(machine.measured) == 1


def test_a_function_that_is_timed_may_call_another_that_is_replaced(machine):
    answer, nested = machine.answer, []

    def call(configs):
        nested.extend(machine.configs(1, 8))
        return answer(configs)

    machine.answer = call
    assert machine.configs(8) != [None] and nested == [None, None]
    assert machine.configs(1) != [None]


def test_a_measurement_sees_nothing_of_the_thread_that_asked(machine):
    answer, seen = machine.answer, []

    def look(configs):
        modes = torch._C._len_torch_function_stack()
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), modes))
        return answer(configs)

    machine.answer = look
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        machine.configs(8)
    assert seen == [(False, False, 0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "best"),
    [
        ({"a": [10, 10, 10]}, {"x": [10.4, 11, 12]}, "a"),
        ({"a": [10, 10, 10]}, {"x": [10.2, 11, 12]}, ""),  # one round within the margin
        ({"a": [10, 10, 10], "b": [9, 9, 30]}, {"x": [12, 12, 12]}, "b"),
        ({"a": [10, 10, 10]}, {"x": [20, 20, 20], "y": [9, 9, 9]}, ""),
        ({}, {"x": [20, 20, 20]}, ""),  # nothing compiled
    ],
)
def test_the_winner_is_faster_than_everything_else_in_every_round(ours, theirs, best):
    assert measurement.winner({**ours, **theirs}, ours) == best


def test_candidates_are_shipped_configs():
    shipped = [row.config for row in SMALL_M_ROWS + SMALL_M_CANDIDATES]
    for m in choice.LAST_ROWS:
        for n, k in ((1024, 4096), (14336, 4096), (4096, 14336), (256, 2048)):
            found = choice.candidates(m, n, k, 40)
            assert set(found) <= set(shipped) and 1 <= len(found) <= 2
            assert launch.first_config(SMALL_M_ROWS, HOPPER, m, n, k, 40) == found[0]


def test_the_rivals_are_functions_that_the_option_replaces():
    targets = {target.name for target in nf4_patch.options.OPTIONS["matmul"].targets}
    assert measurement.RIVALS.keys() <= targets
    nf4_patch.enable(matmul="auto")
    import bitsandbytes.functional

    assert measurement.originals_for(1)["bitsandbytes.functional.gemv_4bit"].__module__ == "bitsandbytes.functional"
    assert bitsandbytes.functional.gemv_4bit is not measurement.originals_for(1)["bitsandbytes.functional.gemv_4bit"]
    assert "bitsandbytes.functional.gemv_4bit" not in measurement.originals_for(2)


def test_a_config_with_wrong_results_is_named():
    """The reference passes as a config. If one bit of the weight changes, or the sums change by 1 %, it fails."""
    packed, state = quantized((256, 512), torch.bfloat16, "cpu")
    layout = layout_of(packed, state)
    x = torch.randn(8, 512, dtype=torch.bfloat16)
    dense = matmul_reference.matmul(torch.eye(512, dtype=torch.bfloat16), layout).t()
    truth = x.double() @ dense.double().t()

    def found(change):
        def multiply(x, out):
            return out.copy_(change(matmul_reference.matmul(x, layout), int(x.count_nonzero()) == len(x)))

        return measurement.wrong(multiply, x, dense, truth)

    def one_bit(result, one_hot):
        result.view(torch.int16)[3, 5] ^= one_hot
        return result

    assert found(lambda result, one_hot: result) == ""
    assert found(one_bit) == "one-hot rows do not return the dequantized weight"
    assert "against fp64" in found(lambda result, one_hot: result if one_hot else result * 1.01)
    assert "against fp64" in found(lambda result, one_hot: result if one_hot else result * float("nan"))


def test_the_state_for_bitsandbytes_dequantizes_like_the_weight(monkeypatch):
    """Run ``random_operands`` on the CPU, and compare with bitsandbytes' own dequantization."""
    from bitsandbytes.functional import dequantize_4bit

    from nf4_patch.nf4.dequantize import reference

    monkeypatch.setattr(measurement.torch, "device", lambda *_: torch.empty(0).device)
    monkeypatch.setattr(runtime, "capability_of", lambda device: ADA)
    before = torch.get_rng_state()
    weight, x = measurement.random_operands(0, 4, 128, 256)
    assert torch.equal(torch.get_rng_state(), before)
    assert x.shape == (4, 256) and x.dtype is weight.dtype is torch.bfloat16
    assert torch.equal(dequantize_4bit(weight.packed, measurement.quant_state(weight)), reference.dequantize(weight))
    monkeypatch.setattr(runtime, "capability_of", lambda device: (7, 5))
    assert measurement.random_operands(0, 4, 128, 256)[0].dtype is torch.float16


class Timing:
    """A GPU whose ``measure`` runs on the CPU. ``us`` has the time of each call by the first part of its name, by default 50."""

    def __init__(self):
        self.us, self.timed, self.results = {}, [], {}

    def gpu_times(self, calls, flushed):
        self.timed = list(calls)
        for call in calls.values():
            call()
        return {name: [next((us for key, us in self.us.items() if name.startswith(key)), 50.0)] * 3 for name in calls}

    def resolve(self, x, weight, bias, config):
        result = self.results.get(config, 1)
        if result is None:
            raise runtime.KernelUnavailable("too many registers")

        def multiply(x, out=None):
            product = matmul_reference.matmul(x, weight) * result
            return product if out is None else out.copy_(product)

        return multiply


@pytest.fixture
def timing(monkeypatch):
    found = Timing()
    monkeypatch.setattr(measurement.torch, "device", lambda *_: torch.empty(0).device)
    monkeypatch.setattr(measurement, "gpu_times", found.gpu_times)
    monkeypatch.setattr(measurement.launch, "resolve", found.resolve)
    monkeypatch.setattr(runtime, "on_device", lambda device: contextlib.nullcontext())
    for name in ("synchronize", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
    return found


WRONG, SLOW, FAST = SMALL_M_ROWS[0].config, SMALL_M_ROWS[1].config, SMALL_M_ROWS[2].config


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures with the real kernels")
@pytest.mark.parametrize(
    ("us", "config"),
    [
        ({}, FAST),
        ({"fused matmul 1-1-8-1-2": 48.5}, FAST),
        ({"fused matmul 1-1-8-1-2": 49.0, "dequantize + matmul, 8 rows": 49.9}, None),  # 2 % faster
        ({GEMM: 9.0}, None),
        ({f"{GEMM}, 5 rows": 9.0}, None),
    ],
)
def test_a_config_wins_if_it_is_right_and_beats_every_original_at_both_ends(timing, caplog, us, config):
    timing.results = {WRONG: 1.01}
    timing.us = {**us, "fused matmul 1-1-8-1-2": us.get("fused matmul 1-1-8-1-2", 10.0), "fused matmul 2-1-8": 48.95}
    seen = []

    def gemm(x, packed, shape, absmax, blocksize, quant_type, bias=None, **nested):
        seen.append((len(x), tuple(shape), absmax.dtype, {name: tensor.dtype for name, tensor in nested.items()}))
        return x

    originals = {GEMM: gemm, "unsloth.kernels.utils._gemv_rows": lambda x, packed, state, out: None}
    found = measurement.measure(0, 5, 8, 128, 256, [WRONG, SLOW, FAST], originals)
    assert found.config == config
    names = [f"{name}, {m} rows" for m in (5, 8) for name in (measurement.DEQUANTIZE, GEMM)]
    assert timing.timed[2:] == names and len(timing.timed) == 4 + 2 and list(found.us) == timing.timed
    dtypes = {"absmax_8bit": torch.uint8, "absmax_code": torch.float32, "absmax_offset": torch.float32}
    assert {m for m, *_ in seen} == {5, 8} and all(rest == [(128, 256), torch.float32, dtypes] for _, *rest in seen)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(WRONG) in warning and "one-hot rows" in warning


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures with the real kernels")
def test_nothing_is_found_where_nothing_compiles_or_memory_is_short(timing, monkeypatch):
    timing.results = {FAST: None}
    assert measurement.measure(0, 1, 1, 128, 256, [FAST], {}) is None
    timing.results = {}
    assert measurement.measure(0, 1, 1, 128, 256, [FAST], {}).config is None  # as fast as the original
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * 128 * 256, 2**30))
    assert measurement.measure(0, 1, 1, 128, 256, [FAST], {}) is None


@pytest.mark.parametrize("late", [0, 3, measurement.ROUNDS])
def test_a_round_in_which_the_gpu_waits_for_the_host_is_dropped(monkeypatch, late):
    clock, rounds = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            self.time = None

        def record(self):
            self.time = clock[0]

        def query(self):
            return len(rounds) > measurement.ROUNDS + 1 - late

        def elapsed_time(self, end):
            return end.time - self.time

    def call(ms):
        clock[0] += ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", rounds.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    zeros = torch.zeros
    monkeypatch.setattr(measurement.torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    times = measurement.gpu_times({"a": functools.partial(call, 2.0), "b": functools.partial(call, 0.5)}, 64)
    assert len(rounds) == measurement.ROUNDS + 1
    assert times == {
        "a": [pytest.approx(2000)] * (measurement.ROUNDS - late),
        "b": [pytest.approx(500)] * (measurement.ROUNDS - late),
    }


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_that_requires_a_gradient_measures_nothing(device, monkeypatch, requires_grad):
    asked = []
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(product, "config_for", lambda *size, may_measure: asked.append((*size, may_measure)))
    packed, state = quantized((64, 128), torch.bfloat16, device)
    x = torch.randn(2, 3, 128, dtype=torch.bfloat16, device=device, requires_grad=requires_grad)
    assert product.FusedMatmul("test").run(x, layout_of(packed, state)) is Reason.NOT_FASTER
    assert asked == [(0, 6, 64, 128, not requires_grad)]


def test_status_lists_what_was_measured(machine):
    assert nf4_patch.status().matmul == ()
    machine.configs(3, 8)
    machine.answer = lambda configs: Measurement(None, {"fused matmul": 30.0, "dequantize + matmul": 20.0})
    machine.configs(64)
    found = nf4_patch.status()
    by_rows = {each.rows: each for each in found.matmul}
    times = {"fused matmul": 10.0, "dequantize + matmul": 20.0}
    assert by_rows[4] == MatmulStatus(0, 4, 4096, 4096, fused=True, us=times)
    assert not by_rows[64].fused and by_rows[64].us["fused matmul"] == 30.0
    words = "GPU 0, up to 4 rows x 4096x4096: the fused matmul runs (fused matmul 10.0 us, dequantize + matmul 20.0 us)"
    assert str(by_rows[4]) == words and "2 of 3 measured sizes run fused" in str(found)
    assert json.dumps(found.as_dict()["matmul"])


def test_doctor_says_what_decides_for_a_gpu(monkeypatch):
    compiled = SimpleNamespace(entry=SimpleNamespace(launch_path="launcher"))
    monkeypatch.setattr(doctor.compilation, "kernel_for", lambda variant, device: compiled)

    def examined(major, minor):
        properties = SimpleNamespace(name="a GPU", total_memory=24 * 2**30, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return doctor.examine_gpu(0, lambda *_: None)

    volta, turing, ada, hopper = examined(7, 0), examined(7, 5), examined(*ADA), examined(*HOPPER)
    assert volta.failures == [Reason.GPU_TOO_OLD.sentence]
    assert turing.kernels["float16"] == "launcher" and not turing.failures and "fp16" in turing.advice
    assert ada.kernels == turing.kernels and ada.advice == hopper.advice == ""
    assert ada.fused_matmul == turing.fused_matmul != hopper.fused_matmul == "by the shipped table"
    assert "measurement at the first use" in ada.fused_matmul
