"""Run each decode step of transformers' ``generate()`` as one CUDA graph: embedding, layers, norm and head.

``generate()`` asks a model whether its decode steps may be compiled, and then asks for the compiled function. If transformers
does not compile the model, for example because it is quantized, this module returns a ``Step``. A Step runs the first token
eagerly and observes it, records the second token, and replays all others. If a step cannot be recorded, each decoder layer
runs as a separate graph or eagerly, as without a Step.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.store import cache
from ..nf4 import runtime
from ..patching.context import is_compiling
from ..patching.counters import counters, warn_once
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function
from ..patching.switch import switch
from ..patching.targets import MODULES
from . import recording
from .arguments import Unsupported, layout_of, replaced, signature
from .calls import CACHE_ARGUMENTS, NOT_CHECKPOINTED, why_not
from .capture import Environment, GraphedLayer, Task, Work
from .fingerprint import Fingerprint, only_requires_gradient
from .generation import tensors_of
from .layers import is_slow
from .recorder import Recorder, own_casts
from .recording import FOR_GOOD, WARNED, why_no_capture, why_not_replayed
from .refusal import Refusal, Refused
from .replay import stream_of
from .shapes import decoder_layers, graphs
from .sliding import LENGTH, length_of, rolling, window_is_full
from .stopping import current
from .warmup import RUNS, HostGenerators, LayerState

# KINDS: the kinds of StaticCache layers whose state on the host is known
KINDS = {
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
}
# ATTEMPTS: how often one ``generate()`` may observe or record a step. Windows of sliding layers become full at some tokens.
ATTEMPTS = 8
GENERATION, MODELS, STATIC_CACHES = (MODULES[name] for name in ("generation", "models", "static caches"))


class Asked(threading.local):
    """Stores, for each thread, the model whose next ``get_compiled_call()`` will return a ``Step``."""

    model: Callable[[], Any] = staticmethod(lambda: None)


asked = Asked()


def valid_auto_compile_criteria(original: Function, model: Any, model_kwargs: Any, generation_config: Any) -> bool:
    """Replace ``GenerationMixin._valid_auto_compile_criteria``. Also return True if the decode steps may become graphs."""
    asked.model = Asked.model
    if original(model, model_kwargs, generation_config):
        return True  # transformers compiles the model
    mixin: Any = sys.modules[GENERATION].GenerationMixin
    own = [getattr(type(model), name, None) is not getattr(mixin, name) for name in ("_sample", "_prefill")]
    if (
        any(own)
        or model.config.is_encoder_decoder
        or model.device.type != runtime.DEVICE
        or not is_static(cache_in(model_kwargs))
    ):
        return False
    asked.model = weakref.ref(model)
    return True


def compiled_call(original: Function, model: Any, compile_config: Any) -> Any:
    """Replace ``PreTrainedModel.get_compiled_call``. Return a Step for the model in ``asked``, else the original's result."""
    is_step, asked.model = asked.model() is model, Asked.model
    return Step(model) if is_step else original(model, compile_config)


def cache_in(arguments: dict[str, Any]) -> Any:
    """Return the cache of keys and values among a model's arguments, or None."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def is_static(static_cache: Any) -> bool:
    """Return whether this is a StaticCache whose layers are all of a kind that graphs support."""
    caches: Any = sys.modules[STATIC_CACHES]
    if type(static_cache) is not caches.StaticCache or getattr(static_cache, "offloading", False):
        return False
    kinds = [type(layer) for layer in static_cache.layers]
    return all(k.__name__ in KINDS and k.__module__ == caches.__name__ for k in kinds)


class StepWork(Work):
    """A call of the model, as the graph of a decode step records it."""

    def __init__(self, task: Task, x: Tensor, buffers: list[Tensor]):
        self.task, self.x, self.buffers, self.leaves = task, x, buffers, []

    def forward(self, recompute: bool = False) -> Tensor:
        """Call the model and return its logits.

        Store two values in ``others``: the class of the model's output, and the names of the output's fields that hold
        the StaticCache.
        """
        task = self.task
        with task.environment.entered(), lengths_restored(task.static_cache), graphs.stepping.entered():
            result = task.function(task.static_cache, self.x, self.buffers)
        self.others: Any = (type(result), [name for name, value in result.items() if value is task.static_cache])
        return result.logits  # type: ignore[no-any-return]


@contextlib.contextmanager
def lengths_restored(static_cache: Any) -> Iterator[None]:
    """Restore the number of tokens of sliding layers after the ``with`` block."""
    lengths = [(layer, length_of(layer)) for layer in static_cache.layers]
    try:
        with rolling(static_cache):
            yield
    finally:
        for layer, length in lengths:
            if length is not None:
                layer.cumulative_length_int = length


def host_state(static_cache: Any) -> list[Any]:
    """Return the attributes of a StaticCache's layers, except the number of tokens. Tensors are represented by their ids."""
    spaces = [{n: v for n, v in vars(layer).items() if n != LENGTH} for layer in static_cache.layers]
    spaces += [{**value} for space in spaces for value in space.values() if type(value) is dict]
    return [(name, id(v) if isinstance(v, (Tensor, dict)) else v) for space in spaces for name, v in space.items()]


class GraphedStep(GraphedLayer):
    """The CUDA graph of a decode step. It can be replayed for every StaticCache with tensors at the same addresses."""

    differentiable = False

    def record(self, task: Task, x: Tensor, buffers: list[Tensor]) -> None:
        self.is_random = False
        self.record_forward(StepWork(task, x, buffers))
        self.addresses = [tensor.data_ptr() for layer in task.static_cache.layers for tensor in tensors_of(layer)]
        inner = decoder_layers(task.layer)
        # ``probe`` is compared at every token: an adapter is added, switched or merged in all layers at once
        self.probe, self.layers = Fingerprint(inner[0] if inner else task.layer), len(inner)


class Step:
    """The function that ``generate()`` calls for each token after the prefill, in place of its model."""

    def __init__(self, model: Any):
        self.model, self.fallbacks = model, Fallbacks(f"{MODELS}.PreTrainedModel.get_compiled_call")
        self.sample = current.sample()
        if self.sample is not None:
            self.sample.model = model
        self.key: Any = None
        self.graph: GraphedStep | None = None
        self.observed: Any = None  # the key of the step that was observed, and the model's fingerprint then
        self.static: list[Tensor] = []  # the tensors of the StaticCache
        self.room = 0  # tokens that the StaticCache can still take
        self.left, self.runs = ATTEMPTS, 0
        self.refused = False

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        plan: Any = None
        if self.sample is not None:
            self.sample.step_begins()
        if not (args or self.refused or is_compiling()) and switch.gates["graphs"].on:
            try:
                plan = self.plan(inputs)
            except Exception as error:
                plan = self.fallbacks.failed(error)
            if type(plan) is Reason:
                self.refuse(Refused(plan, self.fallbacks.details.get(plan, "")))
                plan = None
        if plan is None:
            self.room -= 1
            return self.model(*args, **inputs)
        if self.room <= 0:
            raise ValueError(
                "the static cache is full: it must have room for the prompt and max_new_tokens. Make it longer (max_cache_len)"
            )
        self.room -= 1
        return plan[0](*plan[1:])

    def refuse(self, refused: Refused) -> None:
        """Stop using graphs of whole decode steps in this ``generate()``, and count the Reason in ``refused``."""
        self.refused, self.graph, self.observed = True, None, None
        self.fallbacks.details[refused.reason] = refused.detail
        counters.fall_back(self.fallbacks.target, refused.reason, False, refused.detail)
        if refused.reason in WARNED:
            warn_once(f"nf4_patch: a decode step is not one CUDA graph ({refused.reason.name}): {refused.detail}")

    # --- what to do with a call ---

    def plan(self, inputs: dict[str, Any]) -> Any:
        """Return (function, *arguments) that computes the step, or None if the model has to compute it.

        Return a Reason if the model has to compute this and all later steps.
        """
        x, static_cache = inputs.get("input_ids"), cache_in(inputs)
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != 1:
            return None  # a part of the prompt
        if not is_static(static_cache):
            return Reason.GRAPH_ARGUMENTS
        if is_slow(x.get_device()):
            return Reason.GRAPH_SLOW_GPU
        if (reason := why_not(self.model, (x,), NOT_CHECKPOINTED, True)) is not None:
            return reason
        assert static_cache is not None
        others = {name: value for name, value in inputs.items() if value is not x and value is not static_cache}
        tensors: list[Tensor] = []
        try:
            layouts = signature((x,), tensors), signature(others, tensors)
        except Unsupported as error:
            self.fallbacks.details[Reason.GRAPH_ARGUMENTS] = str(error)
            return Reason.GRAPH_ARGUMENTS
        environment, options = Environment.current(), tuple(switch.config.options.items())  # type: ignore[union-attr]
        static = [tensor for layer in static_cache.layers for tensor in tensors_of(layer)]
        same = len(static) == len(self.static) and all(map(is_, static, self.static))
        full = tuple([window_is_full(layer) for layer in static_cache.layers])
        key = (*layouts, environment, options, full, *([self.key[5]] if same else [tuple(map(layout_of, static))]))
        if not same:
            self.static, self.room = static, room_in(static_cache)
        if cache.auto is not None:
            cache.auto.observe(x)  # before the check, because this call may free cached weights that the graph reads
        graph = self.graph
        if graph is None or not (same and key == self.key and graph.is_in_place() and graph.probe.holds()):
            self.key, self.graph = key, None
            found = self.find(inputs, x, tensors, environment, static_cache)
            if found is not None:
                return found
            graph = self.graph
        assert graph is not None
        if stream_of(graph.recorder.device) != graph.recorder.replay_stream:
            return Reason.GRAPH_MODE
        return self.replay, graph, x, tensors[1:], inputs

    def find(self, inputs: Any, x: Tensor, tensors: list[Tensor], environment: Environment, static_cache: Any) -> Any:
        """Find or record the graph for ``self.key``. Return None if there is a graph now.

        Otherwise return what ``plan`` returns: a function with its arguments, or a Reason.
        """
        model, key = self.model, self.recorded_under
        known = graphs.recording(key, model)
        fingerprint: Any = None
        if isinstance(known, GraphedStep) and known.fingerprint.holds() and known.fingerprint.is_in_place():
            if known.is_in_place() and known.addresses == [tensor.data_ptr() for tensor in self.static]:
                self.graph = known
                return None
            fingerprint = known.fingerprint  # the StaticCache or cached weights lie elsewhere
        elif self.observed is not None and self.observed[0] == key and self.observed[1].holds():
            fingerprint = self.observed[1]
        else:  # the model is new, or might have changed
            graphs.drop_outdated(model)
        self.left -= 1
        if self.left < 0:
            return Reason.GRAPH_CHANGED
        if (refused := graphs.refusal(key, model)) is not None:
            self.fallbacks.details[refused.reason] = refused.detail
            return refused.reason
        if (refused := why_no_capture()) is not None:
            return self.noted(refused)
        try:
            recorder = graphs.recorders.get(x.get_device()) or recording.Recorder(x.get_device())
        except torch.OutOfMemoryError as error:
            return self.noted(Refused(Reason.GRAPH_MEMORY, str(error).splitlines()[0]))
        graphs.recorders[x.get_device()] = recorder
        if stream_of(recorder.device) != recorder.replay_stream:
            return Reason.GRAPH_MODE
        if fingerprint is None:
            fingerprint = Fingerprint(model)
            if refused := why_not_recorded(model, fingerprint, x.device):
                return self.noted(refused)
            state = LayerState(model, fingerprint, [])
            return self.observe, recorder, fingerprint, state, inputs

        names = [name for name, value in inputs.items() if value is static_cache]

        def function(given: Any, x: Tensor, buffers: list[Tensor]) -> Any:
            static = {id(tensor): buffer for tensor, buffer in zip(tensors, [x, *buffers], strict=True)}
            others = {name: value for name, value in inputs.items() if value is not static_cache}
            return model(**replaced(others, lambda tensor: static[id(tensor)]), **dict.fromkeys(names, given))

        task = Task(model, function, x, tensors[1:], environment, fingerprint, False, static_cache)
        with graphs.lock:
            if not graphs.has_room(key, model):
                graphs.drop_oldest_step()
            try:
                with recorder.lock:
                    self.graph = GraphedStep(recorder, task)
                graphs.keep(key, model, self.graph)
                return None
            except Refusal as refusal:
                refused = refusal.refused
            except torch.OutOfMemoryError as error:  # the graphs of the training stay
                refused = Refused(Reason.GRAPH_MEMORY, str(error).splitlines()[0])
            finally:
                if recorder.broken:
                    graphs.drop()
        return self.noted(refused)

    @property
    def recorded_under(self) -> Any:
        return "step", *self.key, weakref.ref(self.model)

    def noted(self, refused: Refused) -> Reason:
        if refused.reason in FOR_GOOD:
            graphs.refuse(self.recorded_under, self.model, refused)
        self.fallbacks.details[refused.reason] = refused.detail
        return refused.reason

    # --- the three ways in which a step runs ---

    def observe(self, recorder: Recorder, fingerprint: Fingerprint, state: LayerState, inputs: dict[str, Any]) -> Any:
        """Run the step eagerly in the modes of a recording, and look for effects that a replay could not repeat."""
        static_cache, host, generator = cache_in(inputs), HostGenerators(), recorder.generator
        held, lengths = host_state(static_cache), [length_of(layer) for layer in static_cache.layers]
        with (
            recorder.lock, recorder.recording(False), cache.pinned(recorder.stream_id), rolling(static_cache) as read,
            graphs.stepping.entered(),
        ):  # fmt: skip
            with recorder.allocating(), own_casts(), recorder.synchronizations() as synchronized:
                result = self.model(**inputs)
            drawn = generator.get_state()
        if not torch.equal(drawn, generator.get_state()):  # the step drew random numbers, which have to stay drawn
            generator.set_state(drawn)
        self.runs += 1
        refused, others = None, [v for n, v in result.items() if not (n == "logits" or v is None or v is static_cache)]
        counted = lengths == [(n := length_of(layer)) and n - 1 for layer in static_cache.layers]
        if others or not isinstance(result.get("logits"), Tensor):
            refused = Refused(Reason.GRAPH_ARGUMENTS, "the model returns more than its logits and the static cache")
        elif state.changed() or not counted or host_state(static_cache) != held:
            refused = Refused(
                Reason.GRAPH_STATE, "a step changes an attribute or a buffer of the model, or of the static cache"
            )
        elif read:
            refused = Refused(Reason.GRAPH_STATE, "the model reads the length of a sliding window on the host")
        elif synchronized:
            refused = Refused(Reason.GRAPH_FAILED, f"it synchronizes with the GPU at {synchronized[0]}")
        elif host.moved(generator):
            refused = Refused(Reason.GRAPH_FAILED, "random numbers were drawn on the host")
        if refused is None:
            self.observed = self.recorded_under, fingerprint
        # Some code waits for the GPU only at its first use, and another thread may draw random numbers.
        elif refused.reason in (Reason.GRAPH_STATE, Reason.GRAPH_ARGUMENTS) or self.runs == RUNS:
            self.refuse(Refused(self.noted(refused), refused.detail))
        else:
            self.left += 1
        return type(result)(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in result.items()})

    def replay(self, graph: GraphedStep, x: Tensor, tensors: list[Tensor], inputs: dict[str, Any]) -> Any:
        with graph.recorder.lock:
            logits = graph.forward(x, tensors) if graph.alive else None
        if logits is None:  # another thread has just dropped all graphs
            return self.model(**inputs)
        graphs.replays += graph.layers
        static_cache = cache_in(inputs)
        for layer in static_cache.layers:
            if (length := length_of(layer)) is not None:
                layer.cumulative_length_int = length + 1
        kind, names = graph.others  # type: ignore[misc]
        return kind(logits=logits, **dict.fromkeys(names, static_cache))


def room_in(static_cache: Any) -> int:
    """Return how many more tokens fit into the StaticCache. Sliding and linear layers always have room."""
    found = [layer for layer in static_cache.layers if hasattr(layer, "cumulative_length") and length_of(layer) is None]
    return int(found[0].max_cache_len - found[0].cumulative_length) if found else sys.maxsize


def why_not_recorded(model: nn.Module, fingerprint: Fingerprint, device: torch.device) -> Refused | None:
    """Return why no step of the model can be recorded, or None."""
    if refused := why_not_replayed(model, fingerprint, only_requires_gradient):
        return refused
    if any(tensor.device != device for tensor in fingerprint.tensors if tensor.numel() > 1):
        return Refused(Reason.GRAPH_ARGUMENTS, "a parameter or buffer is on another device")
    if any(m.training and getattr(m, "gradient_checkpointing", False) for m in fingerprint.modules):
        return Refused(Reason.GRAPH_NOT_TRAINING, "the model generates in training mode with gradient checkpointing")
    return None
