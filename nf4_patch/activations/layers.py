"""Decide which checkpointed decoder layers keep their activations.

A kept layer is called without its checkpoint. The decision is made once per call, in the forward. A layer is kept if
its activations fit into the budget, next to all activations that now wait for their backward.

The size of a layer's activations is measured in a recompute, which holds the same tensors as a kept layer. Training
needs memory for recomputes anyway, so no layer is kept before its size is known.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.spare import User, size_of, spare, tensors
from ..nf4 import runtime
from ..nf4.identity import OwnRef, nobody
from ..patching import context
from ..patching.checkpoint import Checkpoint, checkpoint_of
from ..patching.counters import counters
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function, replacement_of
from ..patching.switch import switch
from ..patching.target import Target
from .option import ActivationsStatus

SIZES = 64  # the most input sizes that are remembered per layer
MANY = 1024  # the most input sizes in a layer's ``exact`` and ``eager``
AGAIN = 16  # a layer is measured again at every AGAIN-th call
FIRST_CALLS = 2  # calls with a size before CUDA graphs replace them; beside graphs, a layer recomputes in these calls
# For up to this many rows, lora="fused" and matmul="auto" round differently without gradients than with gradients. The
# forward of a reentrant checkpoint runs without gradients.
FEW_ROWS = 128
FUNCTION = "_gradient_checkpointing_func"  # the attribute of a layer that holds its checkpoint function
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# The Reasons of calls whose recompute may be measured
MEASURED = {Reason.ACTIVATIONS_WAITING, Reason.ACTIVATIONS_BUDGET}
StopRecomputation: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())


class InputSize(NamedTuple):
    """The size of a layer's input. ``kind`` holds the input's other properties that decide how much memory the activations take."""

    rows: int
    length: int
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, x: Tensor) -> InputSize:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        features, rows, length = size_of(x)
        return cls(rows, length, (features, x.dtype, x.requires_grad, autocast))


class Call:
    """The activations of one call, from its forward to its backward. Only the autograd graph refers to this object.

    The memory is counted as free when the backward begins, or when the graph is freed without a backward.
    """

    waits = True

    def __init__(self, record: Record, device: int, size: int):
        self.record, self.device, self.size, self.taken = record, device, size, activations.taken
        self.taken.setdefault(device, 0)
        self.taken[device] += size  # this line calls nothing, so no other thread and no ``__del__`` can come in between
        record.waiting += 1

    def resize(self, size: int) -> None:
        if self.waits:
            self.taken[self.device] += size - self.size
            self.size = size

    def release(self) -> None:
        if self.waits:
            self.waits = False
            self.taken[self.device] -= self.size
            self.record.waiting -= 1

    __del__ = release

    def before_backward(self, _gradients: Any) -> None:
        if not keeps_graph():
            self.release()


class Record:
    """The measured bytes of a layer's activations by input size, and other properties of the layer."""

    def __init__(self) -> None:
        self.sizes: dict[InputSize, int] = {}  # bytes that the layer holds until its backward
        self.exact: set[InputSize] = set()  # sizes that were measured in a kept call, not in a recompute
        self.eager: Counter[InputSize] = Counter()  # calls without graphs, by size
        self.calls = 0
        self.waiting = 0  # kept calls whose backward has not begun
        self.replay: Callable[[], Any] = nobody  # weak reference to the latest replay under a reentrant checkpoint
        self.kind: type | None = None  # the layer's class at the last ``examine``; FSDP changes it
        self.is_sharded = self.shares = self.has_state = False
        self.kept = 0  # bytes kept at the last call
        self.input_bytes = 0  # bytes of the largest input that the layer's checkpoint would move to host memory
        self.why: Reason | None = None  # the Reason why the last call recomputed
        self.device = -1

    def examine(self, layer: nn.Module) -> None:
        """Find out whether the layer's parameters are sharded, and whether another layer shares a trained parameter."""
        self.kind = type(layer)
        self.is_sharded = any("_is_fsdp_managed_module" in vars(module) for module in layer.modules())
        for p in layer.parameters():
            self.is_sharded |= hasattr(p, "ds_id") or type(p).__torch_dispatch__ is not context.own_dispatch
            if p.requires_grad:
                other = activations.owners.setdefault(p, weakref.ref(self))()
                if other is None:
                    activations.owners[p] = weakref.ref(self)
                elif other is not self:
                    self.shares = other.shares = True

    def awaits_backward(self) -> bool:
        """Return whether a kept call, or a replay under a reentrant checkpoint, awaits its backward.

        Autograd would add up its gradients and those of another such call before it adds the sum to ``grad``.
        """
        replay = self.replay()
        return self.waiting > 0 or (replay is not None and replay.waits)

    def estimate(self, size: InputSize) -> int | None:
        """Return the most bytes that the layer holds until its backward for an input of this size, or None if unknown.

        If this size was not measured, scale the bytes of each larger size by the number of rows, and return the smallest
        result.
        """
        exact = self.sizes.get(size)
        if exact is not None:
            return exact
        larger = (
            held * size.rows // known.rows
            for known, held in list(self.sizes.items())
            if known.kind == size.kind and known.rows >= size.rows and known.length >= size.length
        )
        return min(larger, default=None)

    def measured(self, size: InputSize, held: int, exact: bool = False) -> None:
        self.sizes[size] = max(held, 0)
        if len(self.sizes) > SIZES:
            smallest = min(self.sizes, key=lambda each: each[:2])
            del self.sizes[smallest]
            self.exact.discard(smallest)
        if exact:  # also a size that was forgotten at once, so that it is not measured at every call
            if len(self.exact) == MANY:
                self.exact.clear()
            self.exact.add(size)


class Activations:
    """The layers' kept activations, and the budget for these activations."""

    def __init__(self) -> None:
        self.records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
        # the Record of the layer that a trained parameter belongs to, by parameter
        self.owners = WeakIdKeyDictionary(ref_type=OwnRef)
        self.taken: dict[int, int] = {}  # bytes that wait for their backward, by device
        self.in_graphs: Counter[int] = Counter()  # bytes of ``taken`` that CUDA graphs keep
        self.most: dict[int, int] = {}  # the most bytes that waited since the last ``allow``, by device
        self.budget = 0  # bytes per device
        self.mode: str | int = "off"
        self.give_back: Callable[[], None] = lambda: None  # drops the CUDA graphs, which keep activations too
        self.graphs_are_full: Callable[[], bool] = lambda: False  # whether a new size of input gets no CUDA graphs soon
        self.user = User(0, self.allow, self.taken, self.most, self.wants)

    def configure(self, mode: str | int) -> None:
        if mode != self.mode:
            self.mode = ""  # if an interrupt stops this call, the next call starts over
            spare.leave(self.user)
            self.forget()
            if any(self.in_graphs.values()):
                self.give_back()  # graphs of another mode are never replayed
            self.budget = mode if isinstance(mode, int) else 0
            if mode == "auto":
                spare.join(self.user)
            self.mode = mode

    def forget(self) -> None:
        """Discard the records of all layers. Activations that wait for their backward stay counted."""
        self.records.clear()
        self.owners.clear()

    def add(self, device: int, size: int) -> None:
        """Count ``size`` more bytes of activations that CUDA graphs keep, or fewer if ``size`` is negative."""
        self.in_graphs.setdefault(device, 0)
        self.taken.setdefault(device, 0)
        # These lines call nothing, so no ``__del__`` can come in between.
        self.in_graphs[device] += size
        self.taken[device] += size
        self.most[device] = max(self.most.get(device, 0), self.taken[device])

    def allow(self, budget: int) -> None:
        self.budget = budget
        if not budget:
            self.give_back()
        self.most.clear()
        self.most.update({device: size for device, size in self.taken.items() if size})

    def wants(self, rest: int) -> int:
        """Return how many bytes per GPU the activations can use, if ``rest`` bytes per GPU are left.

        The layers of a GPU need the sum of their activations, and the activations of the largest layer once more, for the
        backward of its CUDA graph. If there are graphs, and all this is less than a quarter of ``rest``, return up to twice as
        much, but no more than this quarter. Sequence lengths without graphs can then keep their activations beside the memory of
        the graphs.
        """
        wanted, largest = Counter[int](), Counter[int]()
        for record in list(self.records.values()):
            size = max(record.sizes.values(), default=0) + record.input_bytes
            wanted[record.device] += size
            largest[record.device] = max(largest[record.device], size)
        every = max((wanted + largest).values(), default=0)
        return every if switch.value("graphs") == "off" else max(every, min(2 * every, rest // 4))

    def why_no_room(self, record: Record, size: InputSize, held: int) -> Reason | None:
        """Count the call. Return the Reason why the layer must not keep ``held`` more bytes until its backward, or None.

        If CUDA graphs will soon replace calls of this size, the memory is left to the graphs.
        """
        if len(record.eager) == MANY:
            record.eager.clear()
        record.eager[size] += 1
        if record.eager[size] <= FIRST_CALLS and self.in_graphs[record.device] and not self.graphs_are_full():
            return Reason.ACTIVATIONS_WAITING
        fits = self.taken.get(record.device, 0) + held <= self.budget
        return None if fits else Reason.ACTIVATIONS_BUDGET

    def record_of(self, layer: nn.Module) -> Record:
        record = self.records.get(layer)
        if record is None:
            record = self.records[layer] = Record()
        return record

    def snapshot(self, mode: str) -> ActivationsStatus:
        records = [record for record in list(self.records.values()) if record.calls]
        why = Counter(record.why.name for record in records if record.why is not None)
        return ActivationsStatus(
            mode=mode,
            kept=sum(record.why is None for record in records),
            layers=len(records),
            size=sum(record.kept for record in records),
            why=dict(why.most_common()),
            budget=self.budget if mode == "auto" else None,
            waits=spare.why.name if mode == "auto" and spare.waits else "",
            numbers=spare.numbers if mode == "auto" else (),
        )


activations = Activations()
fallbacks = Fallbacks("activations")  # not under the target's name, which counts for graphs
switch.follow(lambda config: activations.configure(switch.value("activations")))


def held_elsewhere(device: int) -> int:
    """Return the bytes that other users of spare memory hold, which must not be counted as activations."""
    return sum(user.taken.get(device, 0) for user in spare.users if user is not activations.user)


def allocated(device: int) -> int:
    return int(runtime.memory_allocated(device)) - held_elsewhere(device)


def through(layer: Any, function: Function, original: Function, args: Any, kwargs: Any) -> Any:
    """Call the layer as transformers does, but with ``function`` as the layer's checkpoint function."""
    own = vars(layer)
    before = own.get(FUNCTION)
    if before is None or before is function:  # another thread is in the layer, and puts the function back
        return original(layer, *args, **kwargs)
    try:
        own[FUNCTION] = function  # not by setattr, which nn.Module makes slow
        return original(layer, *args, **kwargs)
    finally:
        own[FUNCTION] = before


def uncheckpointed(function: Function, *args: Any) -> Any:
    return function(*args)


def with_own_inputs(function: Function, *args: Any) -> Any:
    """Call ``function`` with views of its inputs, so that autograd first adds up the gradients of each input within the layer.

    A reentrant checkpoint does the same. If other code also reads an input, a sum in another order would round differently.
    """
    return function(*[x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in args])


def keep(
    call_layer: Function,
    original: Function,
    layer: Any,
    record: Record,
    size: InputSize,
    held: int,
    waits: int,
    device: int,
    args: Any,
    kwargs: Any,
) -> Any:
    """Run the layer without its checkpoint. Count the activations until the autograd graph frees them.

    Args:
        call_layer: runs in place of the checkpoint function.
        held: bytes that the layer is expected to hold.
        waits: bytes of the layer's input, if the checkpoint would move it to host memory, else 0.
    """
    measures = size not in record.exact or record.calls % AGAIN == 0
    call = Call(record, device, held + waits)
    before = allocated(device) if measures else 0
    result = through(layer, call_layer, original, args, kwargs)
    outputs = [y for y in tensors(result) if y.grad_fn is not None]
    if measures:
        held = allocated(device) - before - sum(y.nbytes for y in outputs)
        record.measured(size, held, exact=True)
        record.kept = max(held, 0) + waits
        call.resize(record.kept)
    activations.most[device] = max(activations.most.get(device, 0), activations.taken[device])
    if outputs:
        outputs[0].grad_fn.register_prehook(call.before_backward)  # type: ignore[union-attr]
    elif not isinstance(result, (Tensor, tuple, list, dict)):
        record.has_state = True  # nothing says when the activations are freed
    return result


class Measured:
    """Wraps the function of a checkpoint, and measures how much memory the recompute holds."""

    def __init__(self, function: Function, layer: nn.Module, record: Record, size: InputSize, device: int):
        self.function, self.layer = function, weakref.ref(layer)
        self.record, self.size, self.device = record, size, device

    def __call__(self, *args: Any) -> Any:
        layer = self.layer()
        if layer is None or context.backward_in_progress() == -1 or not torch.is_grad_enabled():
            return self.function(*args)
        written, before = versions(layer), allocated(self.device)
        try:
            result = self.function(*args)
        except StopRecomputation:  # a non-reentrant checkpoint stops once all saved tensors are recomputed
            self.note(layer, written, before)
            raise
        self.note(layer, written, before)
        return result

    def note(self, layer: nn.Module, written: list[int], before: int) -> None:
        self.record.measured(self.size, allocated(self.device) - before)
        self.record.has_state = written != versions(layer)


def versions(layer: nn.Module) -> list[int]:
    return [buffer._version for buffer in layer.buffers() if not buffer.is_inference()]


def measure(
    original: Function, layer: Any, record: Record, size: InputSize, device: int, args: Any, kwargs: Any
) -> Any:
    """Run the layer with its checkpoint, and measure the recompute."""
    checkpoint = vars(layer)[FUNCTION]

    def function(run: Function, *inputs: Any) -> Any:
        return checkpoint(Measured(run, layer, record, size, device), *inputs)

    return through(layer, function, original, args, kwargs)


def is_cut(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a reentrant checkpoint would cut off gradients, or the layer might write to a list or dict.

    A reentrant checkpoint returns gradients only for tensors in ``args``, and only if one of these requires a gradient.
    """
    others = [value for value in args if not isinstance(value, Tensor)] + [*kwargs.values()]
    if any(isinstance(value, (list, dict)) or any(t.requires_grad for t in tensors(value)) for value in others):
        return True
    return not any(isinstance(value, Tensor) and value.requires_grad for value in args)


def why_not(x: Tensor, args: Any, kwargs: Any, checkpoint: Checkpoint | None, record: Record) -> Reason | None:
    """Return the Reason why this call of a layer has to run with its checkpoint, or None if its activations may be kept."""
    if checkpoint is None or (checkpoint.offloads and x.dtype is torch.float32):  # Unsloth rounds it to bf16
        return Reason.ACTIVATIONS_CHECKPOINT
    if context.backward_in_progress() != -1 or context.watched() is not None or runtime.is_capturing():
        return Reason.ACTIVATIONS_HOOKED
    return why_not_unwatched(x, args, kwargs, checkpoint, record)


def why_not_unwatched(x: Tensor, args: Any, kwargs: Any, checkpoint: Checkpoint, record: Record) -> Reason | None:
    """Return the Reason why this call of a layer has to run with its checkpoint, or None.

    The caller has already excluded calls in a backward or under a PyTorch mode, and checkpoints that change the dtype.
    """
    if checkpoint.saves_on_host or not checkpoint.preserves_rng:
        return Reason.ACTIVATIONS_CHECKPOINT
    if context.saved_tensors_hooks(False) is not None:
        return Reason.ACTIVATIONS_HOOKED
    if record.is_sharded or record.has_state:
        return Reason.ACTIVATIONS_LAYER
    if checkpoint.reentrant:
        rounds = size_of(x)[1] <= FEW_ROWS and (switch.gates["lora"].on or switch.gates["matmul"].on)
        if record.shares or record.awaits_backward() or rounds or is_cut(args, kwargs):
            return Reason.ACTIVATIONS_REENTRANT
    return None


def note(layer: nn.Module, x: Tensor, why: Reason | None, size: int) -> None:
    """Record that a call ran as a CUDA graph, and that it kept ``size`` bytes or recomputed for the Reason ``why``."""
    record = activations.record_of(layer)
    record.calls += 1
    record.why, record.kept, record.device = why, size, x.get_device()
    if why is None:
        counters.uses_of("activations").hits += 1
    else:
        fallbacks.count(why)


def kept(target: Target, original: Function) -> Function:
    """Make the replacement for ``transformers.modeling_layers.GradientCheckpointingLayer.__call__``."""
    uses = counters.uses_of("activations")

    def attempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = (partial(original, self, *args, **kwargs),)
        x = next((t for t in tensors([args, kwargs]) if t.is_floating_point() and runtime.runs_on(t)), None)
        if x is None:
            return plain
        if activations.mode == "auto":
            spare.observe(x)
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return plain
        if not x.requires_grad and not any(p.requires_grad for p in self.parameters()):
            return plain
        record, size, device = activations.record_of(self), InputSize.of(x), x.get_device()
        record.device = device
        record.calls += 1
        if record.calls % AGAIN == 1 or record.kind is not type(self):
            record.examine(self)
        checkpoint = checkpoint_of(vars(self).get(FUNCTION))
        why, held = why_not(x, args, kwargs, checkpoint, record), record.estimate(size)
        waits = x.nbytes if checkpoint is not None and checkpoint.offloads else 0
        record.input_bytes = max(record.input_bytes, waits)
        if why is None and (held is None or (activations.mode == "auto" and spare.waits)):
            why = Reason.ACTIVATIONS_WAITING
        elif why is None:
            why = activations.why_no_room(record, size, held + waits)  # type: ignore[operator]
        record.why, record.kept = why, 0
        if why is None:
            uses.hits += 1
            record.kept = held + waits  # type: ignore[operator]
            call_layer = with_own_inputs if checkpoint.reentrant else uncheckpointed  # type: ignore[union-attr]
            return keep, call_layer, original, self, record, size, held, waits, device, args, kwargs
        fallbacks.count(why)
        if why in MEASURED and (size not in record.sizes or record.calls % AGAIN == 0):
            record.exact.discard(size)
            return measure, original, self, record, size, device, args, kwargs
        return plain

    return replacement_of(target, original, fallbacks, attempt)
