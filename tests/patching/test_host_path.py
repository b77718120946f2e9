"""The host path of an eager call without a GPU, with the real Dequantizer, Launch and FusedMatmul."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys

import changes
import matmul_reference
import pytest
import torch
from bitsandbytes.nn import Params4bit
from matmul_reference import tensor_at
from oracle import layout_of, quantized
from target import target_like

from nf4_patch.libraries.bitsandbytes.adapters import gemm, matmul_4bit
from nf4_patch.libraries.unsloth.adapters import matmul_lora
from nf4_patch.matmul import choice, small_m
from nf4_patch.matmul import launch as matmul
from nf4_patch.matmul.product import FusedMatmul
from nf4_patch.nf4 import runtime
from nf4_patch.nf4 import weight as weight_module
from nf4_patch.nf4.dequantize import compilation, launch, reference
from nf4_patch.nf4.weight import PackedWeight
from nf4_patch.patching import guards, op
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.switch import switch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_launch.py runs the launcher itself")


@pytest.fixture
def server(monkeypatch):
    """A Dequantizer. ``server.resolved`` holds the weights in the order in which their launches were resolved."""
    server, of = Dequantizer("test"), compilation.Variant.of
    server.resolved = []
    monkeypatch.setattr(compilation.Variant, "of", lambda *weight: server.resolved.append(weight) or of(*weight))
    return server


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("parameter", [False, True], ids=["Tensor", "Params4bit"])
def test_every_way_to_a_weight(server, nested, transposed, parameter):
    """A new tensor, out, the shared buffer and the single fields: one launch is resolved, and four are counted."""
    packed, state = quantized((64, 96), torch.bfloat16, "cpu", nested=nested)
    want = reference.dequantize(layout_of(packed, state))
    want = want.t() if transposed else want
    weight = Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True) if parameter else packed
    weight = weight.t() if transposed else weight
    out = torch.full((64, 96), float("nan"), dtype=torch.bfloat16)
    with torch._C.DisableTorchFunctionSubclass():
        again = weight.data.as_subclass(torch.Tensor)
    results = [
        server.of_state(weight, state),
        server.of_state(weight, state, out),
        server.of_state(weight, state, into_buffer=True),
        server.run(layout_of(again, state)),
    ]
    for result in results:
        assert torch.equal(result, want) and result.stride() == want.stride()
    assert results[1].data_ptr() == out.data_ptr()
    assert len(server.resolved) == 1 and counters.hits("test") == 4


def test_a_weight_is_known_to_every_target_and_to_the_op(server, monkeypatch):
    """The launch is resolved once. Each target checks the guards itself, and has its own count."""
    packed, state = quantized((64, 96), torch.bfloat16, "cpu")
    want = reference.dequantize(layout_of(packed, state))
    other = Dequantizer("another")
    for _ in range(2):
        assert torch.equal(server.of_state(packed, state), want)
        assert torch.equal(other.of_state(packed, state), want)
        assert torch.equal(op.dequantize(*layout_of(packed, state)), want)
    assert len(server.resolved) == 1 and counters.hits("test") == counters.hits("another") == 2
    weight_module.forget()
    assert torch.equal(op.dequantize(*layout_of(packed, state)), want)
    assert torch.equal(server.of_state(packed, state), want)
    assert len(server.resolved) == 2 and counters.hits("test") == 3
    others = type(counters)()  # as another import of nf4_patch.patching has
    monkeypatch.setattr(sys.modules[Dequantizer.__module__], "counters", others)
    assert torch.equal(Dequantizer("test").of_state(packed, state), want)
    assert counters.hits("test") == 3 and others.hits("test") == 1


def test_an_out_that_the_kernel_must_not_write_is_refused(server):
    """Try another shape, dtype or strides, an unaligned address, a gradient, something that is no tensor, and memory of
    the weight or its scales.
    """
    packed, state = quantized((64, 96), torch.bfloat16, "cpu")
    memory = torch.zeros(4096 + 2 * 64 * 96, dtype=torch.uint8)
    weight = memory[:3072].view(-1, 1).copy_(packed)
    dense = memory[4096:].view(torch.bfloat16).view(64, 96)  # right behind what is read
    state.absmax = memory[4000:4096].copy_(state.absmax)
    half = torch.empty(64, 96, dtype=torch.float16)
    odd = torch.empty(64 * 96 + 1, dtype=torch.bfloat16)[1:].view(64, 96)
    over = [memory[start:][: dense.nbytes].view(torch.bfloat16).view(64, 96) for start in (0, 3056, 4080)]
    crossed, with_gradient = dense.view(96, 64).t(), dense.clone().requires_grad_()
    for out in (crossed, dense[:32], half, dense[:, ::2], odd, with_gradient, "no tensor", *over):
        for _ in range(2):
            assert server.of_state(weight, state, out) is guards.Reason.OUT_MISMATCH
    assert server.of_state(weight, state, dense) is dense and counters.hits("test") == 1
    assert torch.equal(dense, reference.dequantize(layout_of(packed, state)))


@pytest.mark.parametrize(("nested", "change"), changes.EVERY)
def test_a_weight_that_changes_is_read_as_it_is_now(server, nested, change):
    """A target, another target and the op read the weight after it changed."""
    at = changes.weight(nested=nested)
    others = Dequantizer("another").of_state, lambda *weight: op.dequantize(*layout_of(*weight))

    def numbers_of_now():
        want = reference.dequantize(layout_of(at.packed, at.state))
        for read in (server.of_state, *others, server.of_state):
            assert torch.equal(read(at.packed, at.state), want)
        return want

    before = numbers_of_now()
    assert len(server.resolved) == 1
    changes.CHANGES[change](at)
    assert numbers_of_now().shape != before.shape or not torch.equal(numbers_of_now(), before)


class Dispatching(torch.Tensor):
    """A tensor class of a library that handles every operator itself."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def dispatching(tensor):
    return torch.Tensor._make_subclass(Dispatching, tensor.data)


def longer(tensor):
    """Return a view of the tensor's memory with one more element."""
    return tensor.as_strided((tensor.numel() + 1,), (1,))


def every_second(tensor):
    return tensor.as_strided(tensor.shape, (2,) * tensor.dim())


SCALES = ("absmax2", "code2", "offset")
TENSORS = ("packed", "absmax", *SCALES)
# One field of a weight that has a launch, what it becomes at the same address, and the Reason; None: the numbers are of now.
AT_ONE_ADDRESS = [
    *[(field, torch._neg_view, "NOT_CONTIGUOUS") for field in TENSORS],
    *[(field, dispatching, "TENSOR_SUBCLASS") for field in TENSORS],
    *[(field, every_second, "NOT_CONTIGUOUS") for field in TENSORS[:-1]],
    *[(field, longer, "SIZE_MISMATCH") for field in TENSORS],
    *[(field, lambda t: t.view(torch.int32), "STATE_FIELDS") for field in SCALES],
    ("absmax", lambda t: t.view(torch.int8 if t.dtype is torch.uint8 else torch.int32), "STATE_FIELDS"),
    ("absmax2", lambda t: None, "STATE_FIELDS"),
    ("packed", lambda t: t.view(-1)[0], "STATE_FIELDS"),
    ("packed", lambda t: t.view(torch.int8), "STORAGE_DTYPE"),
    ("packed", lambda t: t.view(-1).view(torch.bfloat16).view(-1, 1), None),
    ("packed", lambda t: t.as_strided((2 * t.numel(),), (1,)).view(torch.bfloat16).view(t.shape), "SIZE_MISMATCH"),
    ("packed", lambda t: t.t(), None),
    ("offset", lambda t: t.view(1).view(torch.float16)[:1], None),
    ("offset", lambda t: t.view(1), None),
    ("shape", lambda shape: (shape[1], shape[0]), None),
    ("shape", lambda shape: (2 * shape[0], shape[1]), "SIZE_MISMATCH"),
    ("shape", lambda shape: None, "SIZE_MISMATCH"),
    ("dtype", lambda dtype: torch.bfloat16, None),
    ("dtype", lambda dtype: torch.float64, "OUTPUT_DTYPE"),
    ("dtype", lambda dtype: None, "OUTPUT_DTYPE"),
    ("quant_type", lambda name: "fp4", None),
    ("quant_type", lambda name: "int8", "QUANT_TYPE"),
    ("quant_type", lambda name: ["nf4"], "QUANT_TYPE"),
    ("blocksize", lambda size: 96, "BLOCKSIZE"),
    ("blocksize2", lambda size: 3, "BLOCKSIZE"),
]
HAVE_OTHER_ADDRESSES = {"NOT_CUDA", "ROCM", "GPU_TOO_OLD", "MIXED_DEVICES"}


def test_every_guard_is_walked_at_one_address():
    reasons = {reason.name for reason, _ in guards.GUARDS}
    assert {reason for *_, reason in AT_ONE_ADDRESS if reason} | HAVE_OTHER_ADDRESSES == reasons


def at_one_address():
    """Yield each change of a nested weight, and of a flat weight if it has the field.

    A field changes by another tensor, or through ``.data``.
    """
    for nested, (field, change, reason), in_place in itertools.product((True, False), AT_ONE_ADDRESS, (False, True)):
        can_be_written = field in TENSORS and change is not dispatching
        if (nested or field not in (*SCALES, "blocksize2")) and (can_be_written or not in_place):
            yield nested, field, change, reason, in_place


@pytest.mark.every(2)
@pytest.mark.parametrize(("nested", "field", "change", "reason", "in_place"), [*at_one_address()])
def test_a_remembered_launch_never_answers_for_what_the_guards_refuse(server, nested, field, change, reason, in_place):
    """If a weight changes and changes back, it gets the same answers as a weight that no call used before."""
    weight = layout_of(*quantized((256, 256), torch.float16, "cpu", nested=nested))
    value = getattr(weight, field)
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor:  # with room behind it
        room = torch.zeros(2 * value.numel(), dtype=value.dtype)
        value = room[: value.numel()].view(value.shape).copy_(value)
        weight = weight._replace(**{field: value})
    want = reference.dequantize(weight)
    assert torch.equal(server.run(weight), want)
    before, changed = value.detach() if is_tensor else value, change(value)
    if in_place and changed is not None:
        value.data, changed = changed, value
    assert not isinstance(changed, torch.Tensor) or changed.data_ptr() == before.data_ptr()
    other = weight._replace(**{field: changed})
    for _ in range(2):
        got = server.run(other)
        if reason is None:
            assert torch.equal(got, reference.dequantize(other))
        else:
            assert got is guards.Reason[reason]
    if in_place:
        value.data = before
    assert torch.equal(server.run(weight), want)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_a_key_is_found_without_the_facts_wherever_it_was_found_before(nested, monkeypatch):
    """PyTorch's comparison depends on autocast and inference mode, but the key does not. Few comparisons are stored per address."""
    packed, state = quantized((64, 96), torch.bfloat16, "cpu", nested=nested)
    known, fingerprint, before = [], PackedWeight.fingerprint, 0
    monkeypatch.setattr(PackedWeight, "fingerprint", lambda weight: known.append(1) or fingerprint(weight))
    places = (contextlib.nullcontext, torch.no_grad, torch.inference_mode, functools.partial(torch.autocast, "cpu"))
    classes = (torch.Tensor, Params4bit)
    for turn in range(3):
        found = set()
        for place, kind in itertools.product(places, classes):
            with place(), torch._C.DisableTorchFunctionSubclass():
                found.add(layout_of(packed.as_subclass(kind), state).memo())
        assert len(found) == 1
        if turn:
            assert len(known) == before
        before = len(known)
    for size in range(1, 40):
        layout_of(packed[:size], state).memo()
    assert max(map(len, weight_module._checked.values())) <= 8


def test_keys_are_bounded_and_another_of_the_same_weight_is_no_others(monkeypatch):
    monkeypatch.setattr(weight_module, "LIMIT", 16)
    weights = [layout_of(*quantized((64, 96), torch.bfloat16, "cpu", seed=seed)) for seed in range(40)]
    keys = [weight.memo() for weight in [*weights, *weights]]
    assert len(set(keys)) >= len(weights) and len(set(keys[:40])) == 40
    assert len(weight_module._checked) <= 16 and len(weight_module._memos) <= 16


def test_refusals_by_the_short_way(server):
    """Something that is no 4-bit state, and a shape that cannot be a key, get the same answer as before."""
    packed, state = quantized((64, 96), torch.float16, "cpu")
    for nothing in (None, [state.absmax, state.shape], object()):
        assert server.of_state(packed, nothing) is guards.Reason.NOT_4BIT
    state.shape = [64, 96]
    assert torch.equal(server.of_state(packed, state), reference.dequantize(layout_of(packed, state)))
    state.absmax = state.absmax[:-1]
    assert server.of_state(packed, state) is guards.Reason.SIZE_MISMATCH
    packed, state = quantized((64, 96), torch.float16, "cpu", storage=torch.bfloat16)
    want = server.of_state(packed, state)
    packed.requires_grad_()
    assert server.of_state(packed, state) is guards.Reason.REQUIRES_GRAD
    with torch.no_grad():
        assert torch.equal(server.of_state(packed, state), want)


@pytest.fixture
def multiplier(monkeypatch):
    """Replace the kernel by a function that multiplies the operands at the addresses. ``multiplier.resolved`` counts launches."""
    multiplier = FusedMatmul("test")
    multiplier.resolved = 0

    class Kernel:
        grid, sizes = 1, ()

        def __init__(self, device, dtype, layout, cut, m, bias):
            n, k = layout.shape

            def call(grid, one, another, stream, x, packed, *rest):
                *_, out, spare = rest
                assert packed % 16 == x % 16 == 0
                extra = (tensor_at(spare, (n,), dtype),) if bias else ()
                read = layout._replace(packed=tensor_at(packed, (n * k // 2, 1), torch.uint8))
                result = matmul_reference.matmul(tensor_at(x, (m, k), dtype), read, *extra)
                ctypes.memmove(out, result.contiguous().data_ptr(), result.nbytes)

            self.entry, self.sum = runtime.KernelEntry(call, (), (), "test"), None
            multiplier.resolved += 1

    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    for module in (runtime, launch):
        monkeypatch.setattr(module, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(small_m, "SmallMKernel", Kernel)
    monkeypatch.setattr(matmul, "_kernels", {})
    monkeypatch.setattr(choice, "_configs", {})
    return multiplier


def test_what_a_remembered_product_is_recognized_by(multiplier):
    """Try every kind of call, and every change that affects the result.

    Each launch is resolved once, and results use the current numbers.
    """
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    x = torch.randn(2, 3, 128).bfloat16()
    bias, another = torch.randn(2, 64).bfloat16()

    def check(x, bias=None, out=None):
        matmul._kernels.clear()  # the stand-in of a size knows one weight
        layout = layout_of(packed, state)
        got = multiplier.run(x, layout._replace(dtype=x.dtype), bias, out)
        want = matmul_reference.matmul(x.reshape(-1, 128), layout, bias)
        assert torch.equal(got, want.view(*x.shape[:-1], 64)) and got.dtype is x.dtype
        assert out is None or got is out

    odd = torch.empty(2 * 3 * 128 + 1).bfloat16()[1:].view(2, 3, 128).copy_(x)
    wide = torch.randn(2, 3, 256).bfloat16()
    for values in (x, x + 1, odd, wide[..., ::2]):
        check(values)
    check(x, out=torch.full((2, 3, 64), float("nan")).bfloat16())
    check(x, out=torch.full((2 * 3 * 64 + 1,), float("nan")).bfloat16()[1:].view(2, 3, 64))
    assert len(multiplier.launches) == multiplier.resolved == 1
    for count, arguments in enumerate(((x[:1],), (x.half(),), (x, bias), (x, another), (x.view(6, 128),)), 2):
        for _ in range(2):
            check(*arguments)
        assert len(multiplier.launches) == multiplier.resolved == count
    assert counters.hits("test") == 6 + 2 * 5


@pytest.mark.parametrize(("nested", "change"), changes.EVERY)
def test_a_weight_that_changes_is_multiplied_as_it_is_now(multiplier, nested, change):
    at = changes.weight((64, 128), nested)
    for make in (lambda at: None, changes.CHANGES[change]):
        make(at)
        layout = layout_of(at.packed, at.state)
        x = torch.randn(6, layout.shape[1]).bfloat16()
        for _ in range(2):
            matmul._kernels.clear()  # the stand-in of a size knows one weight
            got = multiplier.run(x, layout._replace(dtype=x.dtype))
            assert torch.equal(got, matmul_reference.matmul(x, layout))


def test_a_weight_off_16_bytes_is_multiplied_by_the_original(multiplier):
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    odd = torch.empty(packed.numel() + 4, dtype=torch.uint8)[4:].view(-1, 1).copy_(packed)
    x, layout = torch.randn(4, 128).bfloat16(), layout_of(odd, state)
    for _ in range(2):
        assert multiplier.run(x, layout) is guards.Reason.MATMUL_OPERANDS


def test_refused_products_are_not_remembered(multiplier):
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    x, freed = torch.randn(4, 128).bfloat16(), packed.clone()
    over = x.view(-1)[:256].view(4, 64)
    freed.untyped_storage().resize_(0)

    def serve(x=x, bias=None, out=None, **fields):
        return multiplier.run(x, layout_of(packed, state)._replace(**fields), bias, out)

    reason = guards.Reason
    for _ in range(2):
        assert serve(x[:0]) is serve(x[:, :64]) is serve(torch.cat([x] * 17)) is reason.NOT_FASTER
        assert serve(packed=packed[:64]) is reason.SIZE_MISMATCH
        assert serve(quant_type="int4") is reason.QUANT_TYPE
        assert serve(packed=freed) is reason.NO_STORAGE
        assert serve(bias=torch.randn(64)) is serve(bias=torch.randn(63).bfloat16()) is reason.MATMUL_OPERANDS
        assert serve(shape=(64, 128, 1)) is reason.MATMUL_OPERANDS
        for out in (torch.empty(4, 63).bfloat16(), torch.empty(4, 64), torch.empty(64, 4).bfloat16().t(), over):
            assert serve(out=out) is reason.OUT_MISMATCH
    assert torch.equal(serve(shape=[64, 128]), serve())  # a list is no key, and serves
    assert serve(torch._neg_view(x)) is reason.MATMUL_OPERANDS
    assert len(multiplier.launches) == 1


def test_a_product_that_cannot_be_compiled_is_named(multiplier, monkeypatch):
    def broken(*arguments):
        raise runtime.KernelUnavailable("ptxas says no")

    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    monkeypatch.setattr(matmul, "resolve", broken)
    assert multiplier.run(torch.randn(4, 128).bfloat16(), layout_of(packed, state)) is guards.Reason.KERNEL_FAILED
    assert multiplier.fallbacks.details == {guards.Reason.KERNEL_FAILED: "ptxas says no"}


@pytest.fixture
def auto(multiplier, monkeypatch):
    monkeypatch.setattr(switch.gates["matmul"], "on", True)
    monkeypatch.setattr(switch, "strict", False)


def matmul_4bit_since_0_50(A, B, quant_state, out=None, bias=None):
    return "original" if quant_state is not None else torch.ops.bitsandbytes.gemm_4bit


def matmul_4bit_before_0_50(A, B, quant_state, out=None, bias=None):
    return "original"


@pytest.mark.parametrize("original", [matmul_4bit_since_0_50, matmul_4bit_before_0_50])
def test_matmul_4bit(original, auto):
    """Without a gradient, the result is the product. The packed weight may be transposed if the original allows this."""
    replacement_of = matmul_4bit(target_like("bitsandbytes", option="matmul"), original)
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    weight = Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)
    layout = layout_of(packed, state)
    bias = torch.randn(64).bfloat16()
    x = torch.randn(2, 3, 128).bfloat16()
    want = matmul_reference.matmul(x.view(6, 128), layout, bias).view(2, 3, 64)
    for each in (packed, packed.t(), weight, weight.t()):
        matmul._kernels.clear()
        got = replacement_of(x, each, state, bias=bias)
        if original is matmul_4bit_before_0_50 and each.shape[0] != 1:
            assert got == "original"
            continue
        assert torch.equal(got, want)
        out = torch.full_like(want, float("nan"))
        assert replacement_of(x, each, state, out, bias) is out and torch.equal(out, want)
    assert replacement_of(x.clone().requires_grad_(), packed.t(), state) == "original"
    assert replacement_of(x, packed.t(), state, bias=bias.clone().requires_grad_()) == "original"
    with torch.no_grad():
        assert torch.equal(replacement_of(x, packed.t(), state, bias=bias.clone().requires_grad_()), want)
    replacement_of(x, packed.t(), state)  # which is remembered
    half = x.half()  # in the dtype of x, whatever the state says
    matmul._kernels.clear()
    want = matmul_reference.matmul(half.view(6, 128), layout._replace(dtype=torch.float16)).view(2, 3, 64)
    assert torch.equal(replacement_of(half, packed.t(), state), want)


def test_gemm(auto):
    """The packed weight may be transposed or not."""
    row = target_like("bitsandbytes", option="matmul")
    replacement_of = gemm(row, lambda *arguments: "original")
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    x = torch.randn(6, 128).bfloat16()
    want = matmul_reference.matmul(x, layout_of(packed, state))
    second = state.absmax, state.state2.code, state.offset
    for each in (packed, packed.t(), packed.view(-1)):
        matmul._kernels.clear()
        got = replacement_of(x, each, state.shape, state.state2.absmax, 64, "nf4", None, *second)
        assert torch.equal(got, want)


def autocast(dtype, function):
    """Return the function's result while CUDA autocasts to dtype. torch.autocast turns itself off without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        return function()
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("lora", [False, True])
def test_matmul_lora(lora, auto):
    """The forward runs the fused matmul.

    The backward, which needs the transposed weight, and calls that the original rounds differently run the original.
    """

    def original(X, W, W_quant, A, B, s, out=None, use_global_buffer=True):
        return "original"

    replacement_of = matmul_lora(target_like("unsloth", option="matmul"), original)
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    weight = reference.dequantize(layout_of(packed, state)).float()
    x, a, b = torch.randn(2, 3, 128).bfloat16(), torch.randn(4, 128), torch.randn(64, 4)
    adapter = (a, b, 0.5) if lora else (None, None, None)
    want = (x.view(6, 128).float() @ weight.t()).bfloat16()
    if lora:
        want.addmm_(x.view(6, 128) @ a.t().bfloat16(), b.t().bfloat16(), alpha=0.5)
    assert torch.equal(replacement_of(x, packed, state, *adapter, use_global_buffer=False), want.view(2, 3, 64))
    out = torch.full_like(want, float("nan"))
    got = replacement_of(x.view(6, 128), packed, state, *adapter, out)
    assert torch.equal(got, want) and got.data_ptr() == out.data_ptr()
    call = functools.partial(replacement_of, x, packed, state, *adapter)
    assert torch.equal(autocast(torch.bfloat16, call), want.view(2, 3, 64))
    assert autocast(torch.float16, call) == "original"
    assert replacement_of(x.half(), packed, state, *adapter) == "original"
    assert replacement_of(x.clone().requires_grad_(), packed, state, *adapter) == "original"
    assert replacement_of(x, packed, None, *adapter) == "original"
    if lora:
        assert replacement_of(x, packed, state, a.requires_grad_(), b, 0.5) == "original"
    back = torch.randn(2, 3, 64).bfloat16()
    assert replacement_of(back, packed.t(), state, None, None, None) == "original"
    assert counters.hits("unsloth.test.test") == 3
