"""generate() reads its stop flag one token late. Tokens, random numbers and calls of the user's code are those without graphs."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import recorders
import test_graphed_layers as graphed
import torch
import transformers
from interrupts import interrupted_at_every_line
from test_decode_steps import LENGTH, model_of
from test_graphed_layers import DEVICE, GPU
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process, utils
from transformers.integrations import sdpa_attention

import nf4_patch
from nf4_patch.graphs import steps, stopping
from nf4_patch.graphs.layers import graphs
from nf4_patch.libraries.transformers import attention

clean = graphed.clean


class Event:
    """A stand-in for torch.Event, which does not exist on a CPU."""

    def __init__(self, **options: Any):
        self.options = options

    def record(self) -> None:
        """Do nothing, because all earlier work is done."""

    synchronize = record


@pytest.fixture(autouse=True)
def late(clean, monkeypatch):
    """Return a list that gets the length of each sequence whose stop flag was read late."""
    if not GPU:
        recorders.install(monkeypatch, recorders.Operations)
        monkeypatch.setattr(torch, "Event", Event)
    lengths: list[int] = []
    check = utils.DeferredStopCheck.__call__

    def checked(self: Any, unfinished: Tensor, tokens: Tensor, length: int) -> bool:
        lengths.append(length)
        return check(self, unfinished, tokens, length)

    monkeypatch.setattr(utils.DeferredStopCheck, "__call__", checked)
    return lengths


def generated(model: Any, batch: int = 2, **options: Any) -> list[Tensor]:
    """Return the tokens, and random numbers that were drawn after generation."""
    ids = torch.randint(3, 500, (batch, 6), generator=torch.Generator().manual_seed(batch)).to(DEVICE)
    torch.manual_seed(5)
    options = {
        "cache_implementation": "static",
        "do_sample": True,
        "disable_compile": True,
        "max_new_tokens": LENGTH,
        **options,
    }
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return [found, torch.rand(4, device=DEVICE), torch.rand(4)]


def results(model: Any, calls: int = 3, **options: Any) -> list[list[Tensor]]:
    return [generated(model, **options) for _ in range(calls)]


def compared(model: Any, late: list[int], **options: Any) -> int:
    """Compare calls of generate(), and return how many tokens each generates. A first call, which ends late, records the step."""
    with nf4_patch.enabled():
        expected = results(model, **options)
    with nf4_patch.enabled(graphs="auto"):
        generated(model, batch=options.get("batch", 2))
        assert not late
        found = results(model, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert ours[0].stride() == theirs[0].stride() and ours[0]._base is None  # a script may call view()
    return expected[0][0].shape[1] - 6


ENDS = {"at max_new_tokens": None, "at the second token": 1, "at the sixth token": 5}


@pytest.mark.every(3)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": False}, {"temperature": 0.7, "top_k": 5, "min_new_tokens": 2}], ids=str
)
def test_where_it_ends(options, end, late):
    """The token that is computed in excess changes neither the tokens nor the random numbers."""
    model = model_of()
    place = ENDS[end]
    with nf4_patch.enabled():
        tokens = generated(model, batch=1, **options)[0][0, 6:].tolist()
    ends = compared(model, late, batch=1, eos_token_id=-1 if place is None else tokens[place], **options)
    assert late == [7 + n for _ in range(3) for n in range(ends + (ends < LENGTH))]


def test_sequences_that_end_at_different_tokens(late):
    model = model_of()
    with nf4_patch.enabled():
        tokens = generated(model, batch=3)[0][:, 6:]
    compared(model, late, batch=3, eos_token_id=[int(row[2 * i + 1]) for i, row in enumerate(tokens)])
    assert late


class Counting:
    """Counts its calls. It serves as a logits processor, a stopping criterion, a streamer, a hook and a prefix function."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *given: Any, **_: Any) -> Any:
        self.calls.append(len(given))
        return given[-1]

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class Criterion(Counting, transformers.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.calls.append(input_ids.tolist())
        return torch.full((len(input_ids),), len(self.calls) % 7 == 0, device=input_ids.device)


class Processor(Counting, transformers.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids.tolist())
        return scores + len(self.calls) / 10 * (torch.arange(scores.shape[-1], device=scores.device) % 7)


class Prefix(Counting):
    def __call__(self, index: int, tokens: Tensor) -> list[int]:  # type: ignore[override]
        self.calls.append(tokens.tolist())
        return list(range(3 + len(self.calls) % 5, 400))


class Caller(Counting):
    """Calls ``_sample`` itself, and keeps the cache of this call."""

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **given):  # type: ignore[no-untyped-def, override]
        found = model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **given)
        self.calls.append([layer.cumulative_length.tolist() for layer in steps.cache_in(given).layers])
        return found


class Model(Counting):
    """A second model with a hook, which guides the first model."""

    def __call__(self) -> Any:
        model = model_of().base_model.model
        model.register_forward_hook(lambda *_: self.calls.append("forward"))
        return logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)


class Replaced(Counting):
    def __call__(self) -> Any:
        processor = logits_process.WatermarkLogitsProcessor(vocab_size=512, device=DEVICE)
        seed = processor.set_seed
        processor.set_seed = lambda tokens: (self.calls.append(tokens.tolist()), seed(tokens))[1]
        return processor


class Synth(Counting):
    """A processor without code of the script, which counts the tokens of all calls."""

    def __call__(self) -> Any:
        keys = {"keys": [1, 2, 3], "sampling_table_size": 64, "sampling_table_seed": 0, "context_history_size": 16}
        return logits_process.SynthIDTextWatermarkLogitsProcessor(ngram_len=3, device=DEVICE, **keys)


def processors(*each: Any) -> dict[str, Any]:
    return {"logits_processor": transformers.LogitsProcessorList(each)}


OWN = {
    "nested criterion": (
        Criterion,
        lambda each: {
            "stopping_criteria": transformers.StoppingCriteriaList([transformers.StoppingCriteriaList([each])])
        },
    ),
    "caller": (Caller, lambda each: {"custom_generate": each}),
    "guided": (Model, lambda each: processors(each())),
    "replaced": (Replaced, lambda each: processors(each())),
    "synth": (Synth, lambda each: processors(each())),
    "criterion": (Criterion, lambda each: {"stopping_criteria": transformers.StoppingCriteriaList([each])}),
    "streamer": (Counting, lambda each: {"streamer": each, "batch": 1}),
    "prefix": (Prefix, lambda each: {"prefix_allowed_tokens_fn": each}),
    "processor": (Processor, lambda each: {"logits_processor": transformers.LogitsProcessorList([each])}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", OWN)
def test_the_users_code_sees_no_further_token(kind, late):
    model = model_of()
    make, options = OWN[kind]
    with nf4_patch.enabled():
        eos = int(generated(model, **{"batch": 1, **options(make())})[0][0, 10])
    found = []
    for on in ({}, {"graphs": "auto"}):
        with nf4_patch.enabled(**on):
            generated(model, batch=1)  # without the user's code: its step is recorded
            del late[:]
            each = make()
            calls = results(model, eos_token_id=eos, **{"batch": 1, **options(each)})
            found.append((calls, each.calls))
    assert not late and found[0][1] == found[1][1]
    assert found[0][0][0][0].shape[1] < 6 + LENGTH
    for theirs, ours in zip(found[0][0], found[1][0], strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.full
def test_a_hook_sees_no_further_token(late):
    model = model_of()
    with nf4_patch.enabled():
        eos = int(generated(model, batch=1)[0][0, 10])
    calls = []
    with nf4_patch.enabled(graphs="auto"):
        results(model, batch=1)
        assert late
        del late[:]
        hook = Counting()
        handle = model.base_model.model.register_forward_hook(hook)
        generated(model, batch=1, eos_token_id=eos)
        calls.append(hook.calls)
        handle.remove()
    with nf4_patch.enabled():
        hook = Counting()
        handle = model.base_model.model.register_forward_hook(hook)
        generated(model, batch=1, eos_token_id=eos)
        calls.append(hook.calls)
        handle.remove()
    assert calls[0] == calls[1] and calls[0] and not late


class Seen:
    """Ways in which a script sees each call of a model. Each method installs one way, and returns a function that removes it."""

    def __init__(self, model: Any):
        self.model, self.calls = model.base_model.model, []

    def note(self, *_: Any) -> None:
        self.calls.append("call")

    def hook_on_a_part(self) -> Any:
        return self.model.model.layers[1].self_attn.register_forward_hook(self.note).remove

    def hook_on_all_modules(self) -> Any:
        return torch.nn.modules.module.register_module_forward_hook(self.note).remove

    def mode(self) -> Any:
        note = self.note

        class Seeing(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                if function is torch.ops.aten.embedding.default:
                    note()
                return function(*args, **(kwargs or {}))

        mode = Seeing()
        mode.__enter__()
        return lambda: mode.__exit__(None, None, None)

    def method_of_its_class(self) -> Any:
        kind, note = type(self.model), self.note

        class Own(kind):  # type: ignore[misc, valid-type]
            @functools.wraps(kind.prepare_inputs_for_generation)
            def prepare_inputs_for_generation(self, *args: Any, **given: Any) -> Any:
                note()
                return super().prepare_inputs_for_generation(*args, **given)

        self.model.__class__ = Own
        return lambda: setattr(self.model, "__class__", kind)


@pytest.mark.every(4)
@pytest.mark.parametrize("way", ["hook_on_a_part", "hook_on_all_modules", "mode", "method_of_its_class"])
def test_the_model_is_not_called_once_more(way, late):
    model = model_of()
    with nf4_patch.enabled():
        eos = int(generated(model, batch=1)[0][0, 10])
    calls = []
    for on in ({}, {"graphs": "auto"}):
        with nf4_patch.enabled(**on):
            results(model, batch=1)
            seen = Seen(model)
            undo = getattr(seen, way)()
            try:
                results(model, batch=1)  # the step is recorded again, if nothing forbids it
                del late[:]
                generated(model, batch=1, eos_token_id=eos)
            finally:
                undo()
            calls.append(seen.calls)
    assert not late and calls[0] == calls[1] and calls[0]


def test_a_method_of_the_library_that_the_script_replaced(late, monkeypatch):
    model, calls = model_of(), []
    with nf4_patch.enabled():
        eos = int(generated(model, batch=1)[0][0, 10])
    monkeypatch.setattr(
        logits_process.TemperatureLogitsWarper, "__call__", lambda self, ids, scores: (calls.append(1), scores)[1]
    )
    with nf4_patch.enabled(graphs="auto"):
        results(model, batch=1)
        del calls[:], late[:]
        found = generated(model, batch=1, eos_token_id=eos, temperature=0.7)
    assert not late and len(calls) == found[0].shape[1] - 6 < LENGTH


def test_a_returned_cache_is_not_ahead(late):
    compared_caches = []
    model = model_of()
    for on in ({}, {"graphs": "auto"}):
        with nf4_patch.enabled(**on):
            for _ in range(2):
                found = model.generate(
                    graphed.tokens(0, 6), max_new_tokens=5, pad_token_id=0, cache_implementation="static", disable_compile=True,
                    return_dict_in_generate=True, do_sample=False,
                )  # fmt: skip
            compared_caches.append([found.past_key_values.layers[0].keys.clone(), found.sequences])
    assert all(map(torch.equal, *compared_caches)) and not late


@pytest.mark.full
def test_after_an_error(late):
    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        results(model, 2)

        class Failing(transformers.StoppingCriteria):
            def __call__(self, *_: Any, **__: Any) -> Tensor:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            generated(model, stopping_criteria=transformers.StoppingCriteriaList([Failing()]))
        assert stopping.current.sample() is None
    del late[:]
    nf4_patch.release()
    compared(model, late)
    assert late


@pytest.mark.full
def test_an_interrupt_leaves_nothing(late):
    """Ctrl-C at any line leaves no reference to the model, and later calls are as without the interrupt."""
    model = model_of()
    with nf4_patch.enabled():
        eos = int(generated(model, batch=1)[0][0, 10])
        expected = generated(model, batch=1, eos_token_id=eos)
    with nf4_patch.enabled(graphs="auto"):
        generated(model, batch=1)
        call = functools.partial(generated, model, batch=1, eos_token_id=eos)
        places = 0
        functions = stopping.sample, stopping.is_supported, stopping.Sample.finished, steps.Step.__call__
        for place in interrupted_at_every_line(call, *functions):
            places += 1
            assert stopping.current.sample() is None, place
            assert all(map(torch.equal, call(), expected)), place
        assert places > 20
        reference = weakref.ref(model.base_model.model)
        del model, call
        gc.collect()
        assert reference() is None


@pytest.mark.full
def test_another_thread_that_may_draw_random_numbers(late):
    model, end = model_of(), threading.Event()
    with nf4_patch.enabled(graphs="auto"):
        results(model, 2)
        assert late
        del late[:]
        other = threading.Thread(target=lambda: end.wait())  # its frame is one of this script
        other.start()
        try:
            generated(model)
        finally:
            end.set()
            other.join()
        assert not late
        generated(model)
        assert late


@pytest.mark.full
def test_an_option_that_is_switched_off_meanwhile(late, monkeypatch):
    """Another thread may call disable() at any time."""
    model = model_of()
    with nf4_patch.enabled():
        eos = int(generated(model, batch=1)[0][0, 10])
        expected = generated(model, batch=1, eos_token_id=eos)
    check = utils.DeferredStopCheck.__call__
    for wanted in range(6):
        with nf4_patch.enabled(graphs="auto"):
            generated(model, batch=1)
            calls: list[int] = []

            def checked(*given: Any, calls: list[int] = calls, wanted: int = wanted) -> bool:
                calls.append(1)
                if len(calls) == wanted:
                    nf4_patch.disable()
                return check(*given)

            monkeypatch.setattr(utils.DeferredStopCheck, "__call__", checked)
            assert all(map(torch.equal, generated(model, batch=1, eos_token_id=eos), expected)), wanted
            assert len(calls) == expected[0].shape[1] - 6 + 1


@pytest.mark.full
def test_an_option_that_is_off(late):
    model = model_of()
    with nf4_patch.enabled(graphs="auto"):
        results(model, 2)
    del late[:]
    with nf4_patch.enabled():
        results(model, 2)
    assert not late and not graphs.knows_step(model)


# --- keys and values for several heads ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n_rep", [1, 2, 8])
def test_repeat_kv(n_rep, dtype):
    x = torch.randint(-(2**15), 2**15, (2, 3, 5, 64), device=DEVICE, dtype=torch.int16).view(torch.bfloat16)
    x = x.to(dtype) if dtype is not torch.bfloat16 else x  # with NaNs of all kinds, whose bits stay
    views = {
        "whole": (x, True), "a window": (x[:, :, 1:4], True), "transposed": (x.transpose(1, 2), True), "from 16 bytes": (x[..., 16:32], True),
        "unaligned": (x[..., 1:33], False), "a short row": (x[..., :3], False), "other order": (x.transpose(2, 3), False),
        "empty": (x[:, :, :0], True), "meant for 3 dims": (x[..., ::2], False),
    }  # fmt: skip
    for name, (view, in_words) in views.items():
        expected = sdpa_attention.repeat_kv(view, n_rep)
        with nf4_patch.enabled(graphs="auto"):
            found = sdpa_attention.repeat_kv(view, n_rep)
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        assert torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits)), name
        assert (
            found.shape == expected.shape
            and found.stride() == expected.stride()
            and attention.is_in_words(view) is in_words
        ), name


def test_repeat_kv_on_another_device():
    """Apple's GPUs have no complex128. The device "meta" stands for them."""
    x = torch.empty(1, 2, 3, 8, dtype=torch.bfloat16, device="meta")
    with nf4_patch.enabled(graphs="auto"):
        assert sdpa_attention.repeat_kv(x, 2).shape == (1, 4, 3, 8) and not attention.is_in_words(x)


def test_repeat_kv_with_a_gradient():
    with nf4_patch.enabled(graphs="auto"):
        x = torch.randn(1, 2, 3, 8, device=DEVICE, requires_grad=True)
        weights = torch.arange(4.0, device=DEVICE)[None, :, None, None]
        (sdpa_attention.repeat_kv(x, 2) * weights).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 5.0], device=DEVICE)[None, :, None, None].expand_as(x))


def test_repeat_kv_with_forward_mode_derivatives():
    x, tangent = torch.randn(1, 2, 3, 8, device=DEVICE), torch.randn(1, 2, 3, 8, device=DEVICE)
    expected = sdpa_attention.repeat_kv(tangent, 2)
    with nf4_patch.enabled(graphs="auto"):
        _, found = torch.func.jvp(lambda x: sdpa_attention.repeat_kv(x, 2), (x,), (tangent,))
        assert torch.equal(found, expected)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(sdpa_attention.repeat_kv(forward_ad.make_dual(x, tangent), 2)).tangent
    assert torch.equal(found, expected)


def test_repeat_kv_of_what_has_no_words():
    negative = torch._neg_view(torch.randn(1, 2, 3, 8, device=DEVICE))
    with nf4_patch.enabled(graphs="auto"):
        found = sdpa_attention.repeat_kv(negative, 2)
        traced = make_fx(lambda x: sdpa_attention.repeat_kv(x, 2))(negative)
    assert torch.equal(found, sdpa_attention.repeat_kv(negative, 2))
    assert [str(n.target) for n in traced.graph.nodes] == [
        str(n.target) for n in make_fx(lambda x: sdpa_attention.repeat_kv(x, 2))(negative).graph.nodes
    ]
