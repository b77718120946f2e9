"""The plain functions that stand where the originals stood: adapt, guard, kernel or original.

Not wrapt objects: torch.compile bypasses or breaks on those. Each keeps its original and consults a
switch on every call, so a replacement that another library has wrapped can still be turned off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..nf4 import runtime
from ..nf4.dequantize import compilation, launch
from ..nf4.dequantize.launch import Launch
from ..nf4.layout import Layout, identity
from ..nf4.matmul import calibration
from . import guards, ops
from .product import Multiplier
from .reasons import Reason
from .stats import ledger, logger

is_compiling = torch.compiler.is_dynamo_compiling  # torch.export without it runs under a dispatch mode
is_exporting = getattr(torch.compiler, "is_exporting", bool)  # PyTorch 2.6 does not say; bool() is False
is_jit_tracing = (
    torch._C._is_tracing
)  # torch.jit.trace. Then a shape holds tensors, which are no key: no launch is found
modes_active = torch._C._len_torch_dispatch_stack
transforms_active = torch._C._functorch.peek_interpreter_stack
own_dispatch = torch._C._disabled_torch_dispatch_impl


class Switch:
    """What every replacement consults: on or off, and what to do at a fallback."""

    def __init__(self) -> None:
        self.on = False
        self.strict = False
        self.defer = "auto"
        self.matmul = "off"


switch = Switch()


def fields_of(state: Any) -> Any:
    """The fields of a Layout after ``packed``, from a bitsandbytes QuantState, or the Reason why it has not all of them."""
    try:
        state2 = state.state2
        if state2 is None:
            return state.absmax, state.code, None, None, None, state.blocksize, 0, state.shape, state.dtype
        return (
            state.absmax, state.code, state2.absmax, state2.code, state.offset,
            state.blocksize, state2.blocksize, state.shape, state.dtype,
        )  # fmt: skip
    except AttributeError:  # nothing but a state's fields is read above
        return guards.state_is_odd(state) or Reason.LAYOUT


class Server:
    """Serves one target: from a weight and its fields to the result or a Reason."""

    def __init__(self, target: str):
        self.target = target
        self.memo = runtime.Memo()
        self.launches = self.memo.launches
        self.failure = self.error = ""  # the latest KERNEL_FAILED and the latest ERROR, in full

    def serve(
        self, weight: torch.Tensor, state: Any, out: torch.Tensor | None = None, shared: bool = False, plain: bool = False
    ) -> Any:  # fmt: skip
        """The dequantized weight of a QuantState, or the Reason why not. A remembered launch is found at once.

        Args:
            out: filled and returned (transposed for a transposed weight).
            shared: the result may live in a buffer that the next such call overwrites.
            plain: the weight's methods are Tensor's own, whatever its class.
        """
        if not plain and type(weight) is not torch.Tensor:
            return self.serve_subclass(weight, state, out, shared)
        launch = None
        if out is None and not modes_active() and transforms_active() is None:
            try:  # not through fields_of, which takes 0.35 us (2-core CPU machine, Python 3.11)
                second = state.state2
                if second is None:
                    launch = self.launches.get(
                        identity(
                            state.quant_type, weight, state.absmax, None, None, None, None,
                            state.blocksize, 0, state.shape, state.dtype,
                        )
                    )  # fmt: skip
                else:
                    launch = self.launches.get(
                        identity(
                            state.quant_type, weight, state.absmax, None, second.absmax, second.code, state.offset,
                            state.blocksize, second.blocksize, state.shape, state.dtype,
                        )
                    )  # fmt: skip
            except (AttributeError, TypeError):  # no QuantState, a field is no tensor, or the shape a list
                pass
        if launch is None:
            fields = fields_of(state)
            if type(fields) is Reason:
                return fields
            return self.serve_fields(weight, fields, state.quant_type, state, out, shared)
        result = launch.shared() if shared else launch.new()
        launch.tally.hits += 1
        return result

    def serve_subclass(self, weight: torch.Tensor, state: Any, out: torch.Tensor | None, shared: bool) -> Any:
        if not isinstance(weight, torch.Tensor):
            return Reason.ARGUMENTS
        if type(weight).__torch_dispatch__ is own_dispatch:
            # Params4bit has a Python __torch_function__: 1.4 us for each data_ptr() without this.
            with torch._C.DisableTorchFunctionSubclass():
                return self.serve(weight, state, out, shared, True)
        if torch.compiler.is_compiling():
            return self.trace(weight, state, out)
        fields = fields_of(state)
        return fields if type(fields) is Reason else Reason.SUBCLASS

    def trace(self, weight: torch.Tensor, state: Any, out: torch.Tensor | None = None) -> Any:
        """As ``serve``, inside a region that torch.compile traces: through the op, whose fake asks the guards."""
        reason = guards.state_is_odd(state)
        if reason is not None:
            return reason
        if is_exporting():
            return Reason.EXPORT
        if out is not None:
            return Reason.OUT
        if not (weight.is_cuda or compilation.INTERPRETED):  # asked here too: on a CPU nothing would be served
            return Reason.NOT_CUDA
        fields = fields_of(state)
        return fields if type(fields) is Reason else ops.dequantize(weight, *fields)

    def serve_fields(self, weight, fields, quant_type, state=None, out=None, shared=False) -> Any:
        """As ``serve``, of the fields of a Layout after ``packed``."""
        if modes_active():
            return self.dispatch(Layout(weight, *fields), state, out)
        if transforms_active() is not None:
            return Reason.TRANSFORM
        try:
            launch = self.launches.get(identity(quant_type, weight, *fields))
        except (AttributeError, TypeError):  # the guards decide
            launch = None
        if launch is None:
            if compilation.INTERPRETED:
                return self.run(Layout(weight, *fields), quant_type, state, out)
            launch = self.prepare(Layout(weight, *fields), quant_type, state)
            if type(launch) is Reason:
                return launch
        if out is not None:
            reason = guards.check_out(out, Layout(weight, *fields))
            if reason is not None:
                return reason
            if out.data_ptr() % 16:
                return Reason.OUT
            result = launch.into(out)
        elif shared:
            result = launch.shared()
        else:
            result = launch.new()
        launch.tally.hits += 1
        return result

    def refuse(self, layout: Layout, state: Any) -> Reason | None:
        reason = guards.state_is_odd(state) if state is not None else None
        return reason or guards.check(layout)

    def decoded_as(self, layout: Layout, quant_type: str) -> Layout | Reason:
        """The layout with the table of its quant_type: bitsandbytes goes by the name and never reads ``state.code``."""
        if is_jit_tracing():
            return Reason.EXPORT
        code = codebook(quant_type, layout.packed.device)
        return code if isinstance(code, Reason) else layout._replace(code=code)

    def prepare(self, layout: Layout, quant_type: str, state: Any) -> Any:
        """Guard and resolve a launch that is then remembered, or the Reason why not."""
        decoded = self.decoded_as(layout, quant_type)
        if isinstance(decoded, Reason):
            return decoded
        reason = self.refuse(decoded, state)
        if reason is not None:
            return reason
        try:
            launch = Launch(decoded, decoded.transposed())
        except runtime.KernelUnavailable as error:
            return self.unavailable(error)
        launch.tally = ledger.tally(self.target, tuple(layout.shape), str(layout.dtype))
        return self.memo.remember(identity(quant_type, *layout._replace(shape=tuple(layout.shape))), launch)

    def unavailable(self, error: runtime.KernelUnavailable) -> Reason:
        reason = Reason[error.reason]
        if reason is Reason.KERNEL_FAILED:
            self.failure = str(error)
        return reason

    def run(self, layout: Layout, quant_type: str, state: Any, out: torch.Tensor | None) -> Any:
        """Under Triton's interpreter: nothing is remembered."""
        decoded = self.decoded_as(layout, quant_type)
        if isinstance(decoded, Reason):
            return decoded
        reason = self.refuse(decoded, state) or (guards.check_out(out, decoded) if out is not None else None)
        if reason is not None:
            return reason
        result = launch.dequantize(decoded, out)
        ledger.tally(self.target, tuple(layout.shape), str(layout.dtype)).hits += 1
        return result.t() if layout.transposed() else result

    def dispatch(self, layout: Layout, state: Any, out: torch.Tensor | None) -> Any:
        """Through the op, which dispatch modes see; nothing is counted."""
        if is_exporting() or is_jit_tracing():
            return Reason.EXPORT
        reason = self.refuse(layout, state) if out is None else Reason.OUT
        return ops.dequantize(*layout) if reason is None else reason

    def failed(self, error: Exception) -> Reason:
        """Our own error never stops a training that would have worked: logged, named, counted."""
        if switch.strict or isinstance(error, torch.cuda.OutOfMemoryError):
            raise error
        self.error = f"{type(error).__name__}: {error}"
        if self.error not in ledger.errors:  # a step makes hundreds of calls: one traceback is enough
            logger.error("nf4_patch failed in %s; the original runs", self.target, exc_info=error)
        return Reason.ERROR

    def tried(self, attempt: Callable[..., Any], *arguments: Any) -> Any:
        """The attempt's result, or the Reason why there is none, counted."""
        try:
            result = attempt(*arguments)
        except Exception as error:
            result = self.failed(error)
        if type(result) is Reason:
            self.fall_back(result)
        return result

    def fall_back(self, reason: Reason) -> None:
        detail = {Reason.KERNEL_FAILED: self.failure, Reason.ERROR: self.error}.get(reason, "")
        ledger.fall_back(self.target, reason, switch.strict, detail)


def keep_dynamo_out(function: Callable[..., Any]) -> None:
    """Dynamo traces neither this function nor what it calls, at no cost a call; inlined frames are not touched.

    Inductor skips a frame with bf16 in it below sm_80 (T4). The frame then runs eagerly, but Dynamo looks into every
    function that it calls, and would compile the host path piece by piece. PyTorch 2.6 has no such switch.
    """
    evaluation = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "_FrameExecStrategy") and hasattr(evaluation, "set_code_exec_strategy"):
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(function.__code__, evaluation._FrameExecStrategy(skip, skip))


keep_dynamo_out(Server.serve)
keep_dynamo_out(Server.serve_fields)


def output_of(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out`` among the arguments of ``dequantize_4bit`` after a state; ARGUMENTS where another differs from the state.

    None, a default written out and what the state says as well change nothing.
    """
    given = {"absmax": None, "out": None, "blocksize": 64, "quant_type": "fp4"}
    names = [*list(given)[: len(args)], *kwargs]
    known = len({*names}) == len(args) + len(kwargs) and given.keys() >= {*names}
    given.update(zip(names, (*args, *kwargs.values()), strict=False))
    agrees = (
        known
        and (given["absmax"] is None or given["absmax"] is getattr(state, "absmax", None))
        and given["blocksize"] in (None, 64, getattr(state, "blocksize", None))
        and given["quant_type"] in ("fp4", getattr(state, "quant_type", None))
    )
    return given["out"] if agrees else Reason.ARGUMENTS


def replace_dequantize_4bit(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.functional.dequantize_4bit``."""
    server = Server(target)
    serve, trace = server.serve, server.trace

    @functools.wraps(original)
    def dequantize_4bit(A, quant_state=None, *args, **kwargs):
        if switch.on:
            out: Any = None
            if args or kwargs:
                alone = not args and kwargs.keys() == {"out"}
                out = kwargs["out"] if alone else output_of(quant_state, args, kwargs)
            if quant_state is None or type(out) is Reason:
                result: Any = Reason.ARGUMENTS
            elif is_compiling():
                result = trace(A, quant_state, out)
            else:
                try:
                    result = serve(A, quant_state, out)
                except Exception as error:
                    result = server.failed(error)
            if type(result) is not Reason:
                return result
            if not is_compiling():
                server.fall_back(result)
        return original(A, quant_state, *args, **kwargs)

    return dequantize_4bit


def linear_fields(A, shapeB, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset) -> tuple[Any, ...]:
    """The fields of a Layout after ``packed``, less the code, from the arguments of bitsandbytes 0.50's 4-bit linear functions."""
    if absmax_8bit is None:
        return (absmax, None, None, None, None, blocksize, 0, tuple(shapeB), A.dtype)
    return (absmax_8bit, None, absmax, absmax_code, absmax_offset, blocksize, 256, tuple(shapeB), A.dtype)


def replace_dequant_linear(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.backends.cuda.ops._dequant_linear_fallback``: dequantize to A's dtype, then F.linear.

    It is the body of an opaque op: torch.compile never traces it.
    """
    server = Server(target)
    multiply = Multiplier(server).serve

    @functools.wraps(original)
    def _dequant_linear_fallback(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None
    ):
        if switch.on:
            fields = linear_fields(A, shapeB, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
            try:
                if switch.matmul != "off":
                    result = multiply(A, B, fields, quant_type, bias)
                    if type(result) is not Reason:
                        return result
                result = server.serve_fields(B, fields, quant_type)
            except Exception as error:
                result = server.failed(error)
            if type(result) is not Reason:
                return F.linear(A, result, bias)
            server.fall_back(result)
        return original(
            A, B, shapeB, absmax, blocksize, quant_type, bias,
            absmax_8bit=absmax_8bit, absmax_code=absmax_code, absmax_offset=absmax_offset,
        )  # fmt: skip

    return _dequant_linear_fallback


def replace_gemm(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl``: its fused product of a few rows."""
    server = Server(target)
    multiply = Multiplier(server).serve

    @functools.wraps(original)
    def _gemm_4bit_kernel_impl(
        A, B, shapeB, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None
    ):
        if switch.on and switch.matmul != "off":
            fields = linear_fields(A, shapeB, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
            result = server.tried(multiply, A, B, fields, quant_type, bias)
            if type(result) is not Reason:
                return result
        return original(
            A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset
        )  # fmt: skip

    return _gemm_4bit_kernel_impl


def product_of(multiplier: Multiplier, x, packed, state, bias=None, out=None, transposed=None) -> Any:
    """The product of x with the weight of a QuantState, in x's dtype, or the Reason why not.

    Args:
        transposed: whether the packed weight has to come as [1, bytes]; None: it does not matter.
    """
    fields = fields_of(state)
    if type(fields) is Reason:
        return fields
    if modes_active():
        return Reason.MODE
    if transforms_active() is not None:
        return Reason.TRANSFORM
    if type(x).__torch_dispatch__ is not own_dispatch or type(packed).__torch_dispatch__ is not own_dispatch:
        return Reason.SUBCLASS
    if (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))) or (
        transposed is not None and (packed.shape[0] == 1) is not transposed
    ):
        return Reason.PRODUCT
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit's methods as a Tensor's
        return multiplier.serve(x, packed, (*fields[:-1], x.dtype), state.quant_type, bias, out, state)


def row_of(multiplier: Multiplier, x, packed, state, out) -> Any:
    """As ``product_of``, of one row."""
    return product_of(multiplier, x, packed, state, None, out) if x.numel() == x.shape[-1] else Reason.PRODUCT


def replace_matmul_4bit(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.autograd._functions.matmul_4bit``, where no gradient is asked for: past the op, whose dispatch
    takes longer than the product of a few rows. Since 0.50 the packed weight may lie either way round.
    """
    server = Server(target)
    multiplier = Multiplier(server)
    transposed = None if "gemm_4bit" in original.__code__.co_names else True  # type: ignore[attr-defined]

    @functools.wraps(original)
    def matmul_4bit(A, B, quant_state, out=None, bias=None):
        if switch.on and switch.matmul != "off" and not is_compiling():
            result = server.tried(product_of, multiplier, A, B, quant_state, bias, out, transposed)
            if type(result) is not Reason:
                return result
        return original(A, B, quant_state, out, bias)

    return matmul_4bit


def replace_gemv(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``bitsandbytes.functional.gemv_4bit``, which Linear4bit calls for one row before 0.50."""
    server = Server(target)
    multiplier = Multiplier(server)

    @functools.wraps(original)
    def gemv_4bit(A, B, out=None, transposed_A=False, transposed_B=False, state=None):
        if switch.on and switch.matmul != "off" and not is_compiling():
            result = server.tried(row_of, multiplier, A, B, state, out)
            if type(result) is not Reason:
                return result
        return original(A, B, out, transposed_A, transposed_B, state)

    return gemv_4bit


def replace_fast_gemv(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For Unsloth's ``fast_gemv`` and ``_fast_gemv_bnb``: [1, 1, K] to [1, 1, N]. Traced, it stays Unsloth's."""
    server = Server(target)
    multiplier = Multiplier(server)

    @functools.wraps(original)
    def fast_gemv(X, W, quant_state, out=None):
        if switch.on and switch.matmul != "off" and not is_compiling():
            result = server.tried(row_of, multiplier, X, W, quant_state, out)
            if type(result) is not Reason:
                return result
        return original(X, W, quant_state, out)

    return fast_gemv


def replace_gemv_rows(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For Unsloth's ``_gemv_rows``: a batch of single tokens, [M, 1, K] to [M, 1, N]; its None means: dequantize."""
    server = Server(target)
    multiplier = Multiplier(server)

    @functools.wraps(original)
    def _gemv_rows(X, W, quant_state, out):
        if switch.on and switch.matmul != "off" and not is_compiling():
            result = server.tried(product_of, multiplier, X, W, quant_state, None, out)
            if type(result) is not Reason:
                return result
        return original(X, W, quant_state, out)

    return _gemv_rows


def lora_product(multiplier: Multiplier, x, packed, state, a, b, scale, out) -> Any:
    """x @ weight.T + (x @ a.T) @ b.T * scale, or the Reason why not: for a packed weight [1, bytes] it is x @ weight."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    adapted = a is not None and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    # the original multiplies in the dtype of autocast, and rounds a weight of another dtype than x's twice
    if adapted or autocast not in (False, x.dtype) or getattr(state, "dtype", x.dtype) is not x.dtype:
        return Reason.PRODUCT
    rows = x.view(-1, x.shape[-1])
    result = product_of(multiplier, rows, packed, state, out=out, transposed=False)
    if type(result) is Reason:
        return result
    if a is not None:
        result.addmm_(rows @ a.t().to(x.dtype), b.t().to(x.dtype), alpha=scale)
    return result.view(*x.shape[:-1], -1)


def replace_matmul_lora(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For Unsloth's ``matmul_lora``: the linear layers of its LoRA kernels, forward. Traced, it stays Unsloth's."""
    server = Server(target)
    multiplier = Multiplier(server)

    @functools.wraps(original)
    def matmul_lora(X, W, W_quant, A, B, s, out=None, **kwargs):
        if switch.on and switch.matmul != "off" and not is_compiling():
            result = server.tried(lora_product, multiplier, X, W, W_quant, A, B, s, out)
            if type(result) is not Reason:
                return result
        return original(X, W, W_quant, A, B, s, out, **kwargs)

    return matmul_lora


TABLES = {
    "nf4": (  # QLoRA (arXiv 2305.14314), appendix E
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)),
}  # fmt: skip


def table(quant_type: str, device: torch.device) -> torch.Tensor:
    """fp32 whatever the default dtype; bitsandbytes' ``get_4bit_type`` follows that."""
    return torch.tensor(TABLES[quant_type], dtype=torch.float32, device=device)


_codebooks: dict[tuple[str, torch.device], torch.Tensor] = {}


def codebook(quant_type: str, device: torch.device) -> torch.Tensor | Reason:
    """The 16 values of a quant_type, fp32 [16]; or why they are not to be had."""
    code = _codebooks.get((quant_type, device))
    if code is None:
        if quant_type not in TABLES:
            return Reason.QUANT_TYPE
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a copy from the host would end it
            return Reason.CAPTURING
        with torch.inference_mode(False):
            code = _codebooks[quant_type, device] = table(quant_type, device)
    return code


# Capabilities where an eager call is measured to be at least as fast as Unsloth's own kernel (2026.10), and the
# measurement; elsewhere Unsloth's keeps its calls, and everywhere in a compiled region: it is a triton_op, which
# Inductor launches without the dispatcher that our op goes through.
FASTER_EAGERLY = {
    (9, 0): "H200, torch 2.11, triton 3.6.0, Unsloth 2026.10.9: 7.6 us a call of the host against 11.1 into the global "
    "buffer and 9.4 against 24.0 into a new tensor; 1.02x (591 MB) to 1.35x (2.6 MB) on the GPU",
}


def deferred(compiling: bool) -> bool:
    """Whether Unsloth's own kernel keeps a call: NF4_PATCH_DEFER, or by what is measured."""
    if switch.defer != "auto":
        return switch.defer == "always"
    return compiling or not measured_everywhere()


def faster_eagerly(device: int) -> bool:
    calibrated = calibration.faster_eagerly(device)
    return torch.cuda.get_device_capability(device) in FASTER_EAGERLY if calibrated is None else calibrated


@functools.cache
def measured_everywhere() -> bool:
    return all(map(faster_eagerly, range(torch.cuda.device_count())))


def replace_fast_dequantize(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For Unsloth's ``fast_dequantize`` and ``_fast_dequantize_bnb``."""
    server = Server(target)
    serve, trace = server.serve, server.trace
    upstream = original.__globals__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False, **kwargs):
        if switch.on:
            own_kernel = upstream.get("_USE_NF4_KERNELS", False)
            if own_kernel and deferred(is_compiling()):
                result = Reason.DEFERRED
            elif is_compiling():
                result = trace(W, quant_state, out)
            else:
                try:
                    result = serve(W, quant_state, out, use_global_buffer)
                except Exception as error:
                    result = server.failed(error)
            if type(result) is not Reason:
                return result
            if not is_compiling():
                server.fall_back(result)
        return original(W, quant_state, out, use_global_buffer, **kwargs)

    return fast_dequantize
