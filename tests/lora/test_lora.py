"""Fused LoRA on 4-bit linear layers: as accurate as peft in every way of training, or peft's forward runs for a named Reason."""

from __future__ import annotations

import contextlib
import gc
import statistics

import pytest
import torch
from alternation import crossed
from fused_matmul import MEASURED
from lora_layers import (
    ALPHA,
    BF16,
    FP16,
    FP32,
    IN,
    OUT,
    RANK,
    ROWS,
    TARGET,
    Model,
    adapted,
    apart,
    assert_close,
    gradient_of,
    inputs,
    layer_of,
    peft,
    randomize,
    step,
)
from results import Results
from target import Plain, Seen, fallbacks
from torch._dynamo.exc import SkipFrame
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as checkpointed

import nf4_patch
from benchmarks.checkpoint import load_4bit
from nf4_patch.libraries.peft import linear as linear_module
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

transformers = pytest.importorskip("transformers")
import bitsandbytes as bnb  # noqa: E402

# dtypes of the adapters, of x and of the base's product, and of autocast
PRECISIONS = {
    "TRL": (BF16, BF16, BF16, BF16),
    "fp32 adapters, autocast": (FP32, BF16, BF16, BF16),
    "bf16": (BF16, BF16, BF16, None),
    "fp32 adapters": (FP32, BF16, BF16, None),
    "fp32": (FP32, FP32, FP32, None),
    "T4": (FP32, FP16, FP16, FP16),
    "fp16": (FP16, FP16, FP16, None),
    "norms in fp32": (BF16, FP32, BF16, BF16),
    "norms and adapters in fp32": (FP32, FP32, BF16, BF16),
    "norms in fp32, T4": (FP32, FP32, FP16, FP16),
    # transformers takes the compute dtype of a packed checkpoint from the checkpoint
    "packed in bf16, T4": (FP32, FP16, BF16, FP16),
    "packed in bf16, norms in fp32, T4": (FP32, FP32, BF16, FP16),
    "packed in bf16, fp16": (FP32, FP16, BF16, None),
    "packed in fp16, bf16": (BF16, BF16, FP16, BF16),
    "bf16 under autocast of fp16": (FP32, BF16, BF16, FP16),
}


def beside(model, x, autocast=None, hits=True):
    """Run a step of fused LoRA and a step of peft with the same random numbers. Return both results."""
    nf4_patch.disable()
    torch.manual_seed(3)
    want = step(model, x, autocast)
    nf4_patch.enable(lora="fused")
    before = counters.hits(TARGET)
    torch.manual_seed(3)
    got = step(model, x, autocast)
    assert (counters.hits(TARGET) > before) is hits
    nf4_patch.disable()
    return got, want


# --- as accurate as peft ---


def exact(model, x, gradient):
    """Compute y and the gradients of x, A and B in fp64."""
    layer = layer_of(model)
    weight, scale = layer.base_layer.weight, layer.scaling["default"]
    w = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    x, d = x.detach().double(), gradient.double()
    return [
        x @ w.T + scale * (x @ a.T) @ b.T, d @ w + scale * (d @ b) @ a, scale * (d @ b).T @ x, scale * d.T @ (x @ a.T)
    ]  # fmt: skip


def errors_of(device, precision, size):
    """Return the mean errors of peft and of fused LoRA, in y and in the gradients of x, A and B. B is scaled by ``size``."""
    adapter, of_x, dtype, autocast = PRECISIONS[precision]
    errors, model = {"peft": [], "fused": []}, adapted(device, dtype, weights=dtype)
    for seed in range(8):
        randomize(model, adapter, seed)
        layer_of(model).lora_B["default"].weight.data.mul_(size)
        x, gradient = inputs(device, of_x, seed), torch.randn(ROWS, OUT).to(device, of_x)
        want = exact(model, x, gradient)
        for side, found in errors.items():
            nf4_patch.enable(lora="fused") if side == "fused" else nf4_patch.disable()
            found.append(
                [apart(got, wanted) for got, wanted in zip(step(model, x, autocast, gradient), want, strict=True)]
            )
    assert counters.hits(TARGET) == 2 * 8 and not fallbacks(TARGET)
    return [[statistics.mean(tensor) for tensor in zip(*found, strict=True)] for found in errors.values()]


@pytest.mark.every(3)
@pytest.mark.parametrize(("size", "precision"), crossed((1, 0.01), PRECISIONS, every=3))
def test_as_accurate_as_peft(device, precision, size):
    """With a small adapter, y and the gradient of x are almost those of the base weight, so only these two are compared."""
    tensors = 4 if size == 1 else 2
    theirs, ours = (errors[:tensors] for errors in errors_of(device, precision, size))
    assert all(mine <= 1.02 * other for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32 adapters", marks=pytest.mark.full)])
def test_in_kernels_as_accurate_as_peft(device, precision, monkeypatch):
    """Compare with peft while the Triton kernels run, which a GPU of compute capability 8.0 or higher uses."""
    monkeypatch.setattr(linear_module, "supports", lambda z, *_: z.dtype is BF16)
    test_as_accurate_as_peft(device, precision, 1)


@pytest.mark.parametrize("reentrant", [None, pytest.param(False, marks=pytest.mark.full)], ids=["kept", "recomputed"])
def test_kernels_write_to_no_result_of_an_op(device, reentrant, monkeypatch):
    """A mode that starts after the forward may keep every result. PyTorch's own writes in place raise the version."""
    monkeypatch.setattr(linear_module, "supports", lambda z, *_: z.dtype is BF16)
    model, x = adapted(device, biased=True), inputs(device)
    model.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=9, target_modules=["fc0"]))
    randomize(model, FP32)
    layer_of(model).set_adapter(["default", "other"])
    model.base_model.model.reentrant = reentrant
    nf4_patch.enable(lora="fused")
    y = model(x)
    with Results() as results:
        y.backward(gradient_of(y))
    assert len(results.kept) > 10 and not results.written_into(unnoticed=True)
    assert counters.hits(TARGET) and not fallbacks(TARGET)


# --- in every way that people train ---

CONFIGS = {
    "plain": {},
    "dropout": {"lora_dropout": 0.3},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"fc1": 4}, "alpha_pattern": {"fc0": 7}},
    "trained bias": {"bias": "all"},
}


@pytest.mark.parametrize(("reentrant", "config"), crossed((None, False, True), CONFIGS, every=2))
def test_a_step_is_peft_s(device, config, reentrant):
    """Two layers in sequence give peft's results and gradients within the rounding of bf16, with the same dropout masks."""
    model = adapted(device, layers=2, biased=True, **CONFIGS[config])
    model.base_model.model.reentrant = reentrant
    for precision in ("TRL", "fp32 adapters", "norms and adapters in fp32", "packed in bf16, T4"):
        adapter, of_x, _, autocast = PRECISIONS[precision]
        randomize(model, adapter)
        assert_close(*beside(model, inputs(device, of_x), autocast))


@pytest.mark.parametrize("shape", [(IN,), (3, IN), (2, 3, IN), (2, 2, 3, IN), (0, IN), (2, 0, IN)])
def test_shapes_of_x(device, shape):
    """Every rank of x, without rows, and with other strides."""
    for x in (
        inputs(device, shape=shape),
        inputs(device, shape=shape[::-1]).detach().permute(*range(len(shape))[::-1]),
    ):
        assert_close(*beside(adapted(device, biased=True), x.requires_grad_()))


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "x", "both"])
def test_what_needs_no_gradient_gets_none(device, frozen):
    model, x = adapted(device), inputs(device)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.requires_grad_(frozen not in name and frozen != "both")
    assert_close(*beside(model, x.requires_grad_(frozen != "x")))


def test_accumulation_and_two_backwards(device):
    """Two backward passes through one retained graph accumulate gradients."""
    model, x = adapted(device), inputs(device)
    nf4_patch.enable(lora="fused")
    once = step(model, x)
    model.zero_grad()
    x.grad = None
    y = model(x)
    y.backward(gradient_of(y), retain_graph=True)
    y.backward(gradient_of(y))
    twice = [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
    assert all(torch.equal(2 * a, b) for a, b in zip(once[1:], twice, strict=True))


@pytest.mark.parametrize("reentrant", [None, False], ids=["kept", "recomputed"])
def test_second_derivatives_raise(device, reentrant):
    """A step through the inner step of meta-learning must not leave the second derivatives out."""
    model, x = adapted(device, layers=2), inputs(device)
    model.base_model.model.reentrant = reentrant
    a = layer_of(model).lora_A["default"].weight
    nf4_patch.enable(lora="fused")
    (first,) = torch.autograd.grad(model(x).float().square().mean(), a, create_graph=True)
    for allow_unused in (False, True):
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad((a - first).square().sum(), a, retain_graph=True, allow_unused=allow_unused)
    with pytest.raises(RuntimeError, match="second derivatives"):
        first.sum().backward()


@pytest.mark.parametrize("reentrant", [None, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_second_derivatives_through_the_input_raise(device, factor, reentrant):
    """With a linear loss, the gradient of A or B depends on x only as the input, and not through the layer's result."""
    model, x = adapted(device, adapter=FP32 if factor == "lora_A" else BF16), inputs(device)
    model.base_model.model.reentrant = reentrant
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(factor in name)
    trained = getattr(layer_of(model), factor)["default"].weight
    nf4_patch.enable(lora="fused")
    (first,) = torch.autograd.grad(model(x).float().sum(), trained, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(first.sum() + x.sum(), x)


def test_gradients_of_some_inputs(device):
    """``torch.autograd.grad`` for x alone, then for A alone, on one retained graph."""
    model, x = adapted(device), inputs(device)
    a = layer_of(model).lora_A["default"].weight
    nf4_patch.enable(lora="fused")
    want = step(model, x)
    y = model(x)
    (of_x,) = torch.autograd.grad(y, x, 3 * gradient_of(y), retain_graph=True)
    (of_a,) = torch.autograd.grad(y, a, gradient_of(y))
    assert torch.equal(of_a, want[2]) and apart(of_x, 3 * want[1].double()) < 1e-2


def test_several_adapters_and_switching(device):
    model = adapted(device)
    model.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=9, target_modules=["fc0"], lora_dropout=0.2))
    randomize(model, BF16, seed=5)
    x, layer = inputs(device), layer_of(model)
    results = []
    for active in ("default", "other", ["default", "other"]):
        layer.set_adapter(active)
        got, want = beside(model, x)
        assert_close(got, want)
        results.append(got[0])
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    layer.lora_dropout.eval()  # both of x itself
    assert_close(*beside(model, x))


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
def test_an_adapter_switched_before_the_backward(device, reentrant):
    """The backward gives peft's gradients: without a checkpoint those of the old adapter, with one those of the new adapter."""
    model = adapted(device)
    model.add_adapter("other", peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["fc0"]))
    randomize(model, BF16, seed=5)
    model.base_model.model.reentrant = reentrant
    x, layer = inputs(device), layer_of(model)

    def switched(to):
        model.zero_grad()
        x.grad = None
        layer.set_adapter("default")
        y = model(x)
        layer.set_adapter(to)
        y.backward(torch.ones_like(y))
        adapters = [getattr(layer, part)[name].weight for name in ("default", "other") for part in ("lora_A", "lora_B")]
        return [y.detach(), x.grad, *(torch.zeros_like(a) if a.grad is None else a.grad for a in adapters)]

    want = switched("other")
    nf4_patch.enable(lora="fused")
    assert_close(switched("other"), want)
    assert reentrant is not None or torch.equal(switched("other")[1], switched("default")[1])
    assert counters.hits(TARGET) and not fallbacks(TARGET)


@pytest.mark.parametrize("options", [("fused", "off"), ("off", "fused")], ids=" then ".join)
def test_an_option_that_changes_before_the_recompute_is_noticed(device, options):
    model, x = adapted(device), inputs(device)
    model.base_model.model.reentrant = False
    nf4_patch.enable(lora=options[0])
    y = model(x)
    nf4_patch.enable(lora=options[1])
    with pytest.raises(CheckpointError):
        y.sum().backward()


# The dtypes of x and of autocast. peft respects autocast on a GPU only, and adds bf16 and fp16 in fp32 there.
INFERENCE = [(BF16, None), (FP32, BF16), (FP16, None), (FP16, FP16), (BF16, FP16)]


@pytest.mark.parametrize(
    ("rows", "inference"), crossed((1, 5, 300), INFERENCE if torch.cuda.is_available() else INFERENCE[:-1])
)
def test_without_a_gradient(device, rows, inference):
    """With few rows, the base layer multiplies, and LoRA is added to its result. The layer computes in bf16."""
    dtype, autocast = inference
    model, x = adapted(device, adapter=FP32, biased=True), inputs(device, dtype, shape=(rows, IN)).detach()
    for context, matmul in ((torch.no_grad, "off"), (torch.inference_mode, "off"), (torch.no_grad, "auto")):
        with context(), torch.autocast(device.type, autocast or BF16, enabled=autocast is not None):
            nf4_patch.disable()
            want, base = model(x), layer_of(model).base_layer(x)
            nf4_patch.enable(lora="fused", matmul=matmul)
            kept = base.clone()
            before = counters.hits(TARGET)
            got = model(x)
            assert apart(got, want) < 1e-2 and got.dtype is want.dtype and not fallbacks(TARGET)
            in_kernels = matmul == "auto" and MEASURED and rows <= 64 and (dtype, autocast) == (BF16, None)
            assert counters.hits(TARGET) - before == (in_kernels or rows > linear_module.FEW_ROWS)
            assert torch.equal(base, kept)


@pytest.mark.parametrize("shape", [(ROWS, IN), (2, ROWS, IN), (3, IN)], ids=["rows", "batch", "few"])
@pytest.mark.parametrize("of_x", [BF16, FP32], ids=["bf16", "fp32"])
def test_the_result_is_no_view(device, shape, of_x):
    """The result can be written to in place, in another grad mode too, and can be detached in place."""
    model, x = adapted(device), inputs(device, of_x, shape=shape)
    nf4_patch.enable(lora="fused")
    trained = torch.nn.Parameter(torch.ones(OUT, device=device))
    for context in (torch.no_grad, contextlib.nullcontext):
        with torch.autocast(device.type, BF16):
            with context():
                y = model(x)
                kept = y.detach().clone()
            y += trained
        y.float().sum().backward()
        assert trained.grad.eq(y.numel() / OUT).all() and torch.equal(y.detach(), kept.add_(trained.detach()))
        trained.grad = None
    y = model(x.to(BF16))
    assert not y._is_view() and y.detach_() is y and not y.requires_grad
    assert counters.hits(TARGET) and not fallbacks(TARGET)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "adapters"),
    crossed(("TRL", "fp32 adapters", "packed in bf16, norms in fp32, T4"), (["default"], ["default", "other"])),
)
def test_compiled_autograd(device, fresh_dynamo, adapters, precision, monkeypatch):
    """The backward is a single graph that contains PyTorch's products instead of our kernels."""
    dropout = 0 if len(adapters) == 1 else 0.3
    monkeypatch.setattr(linear_module, "supports", lambda z, *_: z.dtype is BF16)
    adapter, of_x, dtype, autocast = PRECISIONS[precision]
    model, x = adapted(device, dtype, weights=dtype, lora_dropout=dropout), inputs(device, of_x)
    model.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=9, target_modules=["fc0"]))
    randomize(model, adapter)
    layer_of(model).set_adapter(adapters)
    nf4_patch.enable(lora="fused")
    results, counter = [], CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        torch.manual_seed(3)
        with contextlib.ExitStack() as stack:
            if compiled:
                compiler = torch.compile(backend=counter, fullgraph=True)
                stack.enter_context(torch._dynamo.compiled_autograd._enable(compiler))
            results.append(step(model, x, autocast))
    assert_close(*results, 1e-2)
    assert counter.frame_count == 1 and not fallbacks(TARGET)


# The dtype of the parameters that are not packed. None leaves them as transformers 5.24 loads them: CPU autocast rejects those.
DENSE = [FP16, FP32, None]


@pytest.mark.parametrize("dense", DENSE if torch.cuda.is_available() else DENSE[:-1])
def test_a_checkpoint_packed_in_bf16_trains_in_fp16(device, checkpoint, tmp_path, dense):
    """On a T4, transformers ignores ``bnb_4bit_compute_dtype`` and reads the layers' compute dtype from the checkpoint."""
    load_4bit(checkpoint, device).train().save_pretrained(tmp_path)
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=FP16)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, dtype=FP16, device_map={"": device}
    ).train()
    assert {each.compute_dtype for each in model.modules() if isinstance(each, bnb.nn.Linear4bit)} == {BF16}
    for parameter in model.parameters():
        if dense is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dense)
    config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    randomize(model, FP32)
    tokens = torch.randint(3, 512, (2, 80), generator=torch.Generator().manual_seed(0)).to(device)

    def gradients():
        model.zero_grad()
        with torch.autocast(device.type, FP16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    want = gradients()
    nf4_patch.enable(lora="fused")
    assert_close(gradients(), want)
    assert counters.hits(TARGET) >= 7 and not fallbacks(TARGET)


def test_merged_and_taken_out_again(device):
    model, x = adapted(device), inputs(device)
    layer = layer_of(model)
    layer.merge()
    beside(model, x, hits=False)
    layer.unmerge()
    assert_close(*beside(model, x))


def test_modules_to_save(device):
    """A fully trained dense layer follows a layer with an adapter."""
    torch.manual_seed(0)
    model = Model(device)
    model.head, model.names = torch.nn.Linear(OUT, 8, device=device, dtype=BF16), ["fc0", "head"]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc0"], modules_to_save=["head"]))
    randomize(model, BF16)
    got, want = beside(model, inputs(device))
    assert_close(got, want)
    assert len(got) == 2 + 2 + 2  # y and of x; of A and B; of the head's weight and bias


def test_generation(device, checkpoint):
    """Generate from a prompt of many rows, then with one row per token, and compare the first logits."""
    model = load_4bit(checkpoint, device)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    randomize(model, BF16)
    torch.manual_seed(0)
    prompt = torch.randint(3, 512, (2, 80)).to(device)

    def logits():  # in training mode, because in evaluation bitsandbytes repacks the weights of a CPU
        options = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
        found = model.train().generate(prompt, attention_mask=torch.ones_like(prompt), suppress_tokens=[2], **options)
        return found.logits[0], found.sequences

    want, sequences = logits()
    nf4_patch.enable(lora="fused")
    got, others = logits()
    assert apart(got, want) < 2e-2 and counters.hits(TARGET) and not fallbacks(TARGET)
    assert others.shape == sequences.shape


def test_a_cached_weight_is_read_and_left_as_it_is(device):
    nf4_patch.enable(lora="fused", cache="1GiB")
    model, x = adapted(device), inputs(device)
    first = step(model, x)
    hits = nf4_patch.status().cache.hits
    assert all(map(torch.equal, step(model, x), first))
    assert nf4_patch.status().cache.hits >= hits + 2


def test_a_recompute_ends_before_the_last_product(device):
    """With two layers in one checkpoint, the recompute does not decode the second layer's weight."""
    model, x = adapted(device, layers=2), inputs(device)
    nf4_patch.enable(lora="fused")
    first, second = layer_of(model), layer_of(model, "fc1")
    y = x.new_zeros(OUT) + checkpointed(lambda x: second(torch.nn.functional.silu(first(x))), x, use_reentrant=False)
    y.float().square().sum().backward()
    assert counters.hits(TARGET) == 2 + 1 + 2


def test_nothing_more_is_kept_than_peft_keeps(device):
    """The forward saves at most as many bytes as peft's, counting each storage once."""

    def kept(model, x):
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: storages.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) or t,
            lambda t: t,
        ):
            y = model(x)
        return sum(storages.values()), y

    model, x = adapted(device, layers=3), inputs(device)
    theirs, _ = kept(model, x)
    nf4_patch.enable(lora="fused")
    ours, _ = kept(model, x)
    assert ours <= theirs


def test_an_error_leaves_no_frames_behind(device):
    """A checkpoint ends its recompute by an exception, which must not keep the layer's tensors alive."""
    model, x = adapted(device, layers=2), inputs(device)
    nf4_patch.enable(lora="fused")
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        for _ in range(3):
            checkpointed(model, x, use_reentrant=False).float().sum().backward()
        assert sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) <= before + 8  # gradients
    finally:
        gc.enable()


# --- where peft's forward runs ---


def with_hook(part):
    def change(model):
        layer = layer_of(model)
        module = layer.base_layer if part == "base" else getattr(layer, part)["default"]
        module.register_forward_hook(lambda module, args, output: 2 * output)

    return change


def replaced(part, kind):
    def change(model):
        layer = layer_of(model)
        if part == "base":
            layer.base_layer.__class__ = type("Mine", (type(layer.base_layer),), {})
        else:
            getattr(layer, part)["default"] = kind()

    return change


def forward_of_its_own(model):
    base = layer_of(model).base_layer
    forward = base.forward
    base.forward = lambda x: 2 * forward(x)


def parametrized(model):
    torch.nn.utils.parametrizations.weight_norm(layer_of(model).lora_A["default"])


def subclassed(model):
    class Mine(type(layer_of(model))):
        pass

    layer_of(model).__class__ = Mine


def cast(model):
    layer_of(model).lora_A["default"].to(FP16)
    layer_of(model).lora_B["default"].to(FP16)


def as_it_is(model):
    """Change nothing: the configuration alone is not supported."""


REFUSED = {
    "DoRA": ({"use_dora": True}, as_it_is, Reason.LORA_VARIANT),
    "a bias of LoRA": ({"lora_bias": True}, as_it_is, Reason.LORA_VARIANT),
    # without autocast: peft's sum of base and LoRA is not rounded to the dtype of the base's product
    "x in fp32": ({"x": FP32}, as_it_is, Reason.LORA_DTYPES),
    "x and adapters in fp32": ({"x": FP32, "adapter": FP32}, as_it_is, Reason.LORA_DTYPES),
    "disabled": ({}, lambda model: layer_of(model).enable_adapters(False), Reason.LORA_INACTIVE),
    "merged": ({}, lambda model: layer_of(model).merge(), Reason.LORA_INACTIVE),
    "a hook on A": ({}, with_hook("lora_A"), Reason.LORA_HOOKED),
    "a hook on B": ({}, with_hook("lora_B"), Reason.LORA_HOOKED),
    "a hook on the base layer": ({}, with_hook("base"), Reason.LORA_HOOKED),
    "a hook on dropout": ({}, with_hook("lora_dropout"), Reason.LORA_HOOKED),
    "another dropout": ({}, replaced("lora_dropout", torch.nn.AlphaDropout), Reason.LORA_HOOKED),
    "a subclass of the base layer": ({}, replaced("base", None), Reason.LORA_HOOKED),
    "a forward of the base layer's own": ({}, forward_of_its_own, Reason.LORA_HOOKED),
    "a parametrization": ({}, parametrized, Reason.LORA_HOOKED),
    "a subclass": ({}, subclassed, Reason.LORA_HOOKED),
    "another dtype": ({}, cast, Reason.LORA_DTYPES),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_served_is_peft_s_to_the_bit(device, kind):
    config, change, reason = REFUSED[kind]
    options = {"x": BF16} | config
    x = inputs(device, options.pop("x"))
    model = adapted(device, **options)
    change(model)
    got, want = beside(model, x, hits=False)
    assert all(map(torch.equal, got, want)) and fallbacks(TARGET) == {reason: 1}


class Wrapping(torch.Tensor):
    """A class whose results have the same class and inherit an attribute, as MONAI's MetaTensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.tag = next(each.tag for each in args if hasattr(each, "tag"))
        return result


@pytest.mark.parametrize("cls", [Wrapping, Plain])
def test_a_class_of_tensors_of_its_own_is_peft_s(device, cls):
    model, x = adapted(device), inputs(device).detach().as_subclass(cls)
    x.tag = "mine"
    want = model(x)
    nf4_patch.enable(lora="fused")
    got = model(x)
    assert type(got) is type(want) is cls and torch.equal(got, want) and vars(got) == vars(want)
    assert fallbacks(TARGET) == {Reason.TENSOR_SUBCLASS: 1}


def test_a_torch_function_mode_sees_peft_s_own(device):
    model, x = adapted(device), inputs(device)
    seen = []
    for switch_it in (nf4_patch.disable, lambda: nf4_patch.enable(lora="fused")):
        switch_it()
        with Seen() as mode:
            seen.append((mode.functions, model(x)))
    assert seen[0][0] == seen[1][0] and torch.equal(seen[0][1], seen[1][1])
    assert fallbacks(TARGET) == {Reason.FUNCTION_MODE: 1}


def test_an_input_that_left_a_transform(device):
    """A tensor that outlives ``torch.func.grad`` keeps its wrapper, and still works as an input."""
    model, left = adapted(device), []
    with torch.no_grad():
        torch.func.grad(lambda x: left.append(x * 1) or x.float().sum())(inputs(device).detach())
    x = left[0].requires_grad_()
    assert_close(*beside(model, x))


def test_a_hook_on_every_module_is_called(device):
    called = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module)):
        model, x = adapted(device), inputs(device)
        got, want = beside(model, x, hits=False)
    assert all(map(torch.equal, got, want)) and fallbacks(TARGET) == {Reason.LORA_HOOKED: 1}
    assert called.count(layer_of(model).lora_A["default"]) == 2


def test_a_mixed_batch_is_peft_s(device):
    model, x = adapted(device).eval(), inputs(device, shape=(2, IN)).detach()
    names = ["default", "__base__"]
    with torch.no_grad():
        want = layer_of(model)(x, adapter_names=names)
        nf4_patch.enable(lora="fused")
        got = layer_of(model)(x, adapter_names=names)
    assert torch.equal(got, want) and fallbacks(TARGET) == {Reason.LORA_INACTIVE: 1}


def test_a_weight_in_the_layout_for_cpu_kernels_is_peft_s(device):
    """No kernel of nf4_patch reads this layout, and bitsandbytes' own functions for GPUs misread it."""
    model, x = adapted(device), inputs(device)
    layer_of(model).base_layer.weight.quant_state.packing_format_for_cpu = True
    nf4_patch.enable(lora="fused")
    with contextlib.suppress(Exception):
        model(x)
    assert fallbacks(TARGET) == {Reason.CPU_PACKING: 1} and not counters.uses_of("lora").hits


@pytest.mark.full
def test_torch_compile_traces_peft_s_own(device, fresh_dynamo):
    """torch.compile makes a single graph, without a break or a recompilation, bit-identical to compiled peft."""
    model, x, results = adapted(device, layers=2, biased=True), inputs(device), []
    for option in ("off", "fused"):
        torch._dynamo.reset()
        nf4_patch.enable(lora=option)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        results += step(compiled, x), step(compiled, x)
        assert counter.frame_count == 1
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    assert not fallbacks(TARGET) and not counters.hits(TARGET)


@pytest.mark.full
def test_a_frame_that_dynamo_skips_is_served(device, fresh_dynamo):
    """Inductor skips bf16 graphs on a T4. The layers then run eagerly, and Dynamo compiles none of nf4_patch's functions."""
    model, x = adapted(device, layers=2), inputs(device)
    traces = []

    def skip(graph, _):
        traces.extend(node.meta.get("stack_trace", "") or "" for node in graph.graph.nodes)
        raise SkipFrame("as on a T4")

    want = step(model, x)
    nf4_patch.enable(lora="fused")
    got = step(torch.compile(model, backend=skip), x)
    assert_close(got, want)
    assert counters.hits(TARGET) == 4 and not fallbacks(TARGET)
    assert any("return original(*args" in trace for trace in traces)
    assert not any(name in trace for trace in traces for name in ("in run\n", "in prepare\n", "lora/function.py"))


def test_changes_between_forward_and_backward_are_noticed(device):
    model, x = adapted(device), inputs(device)
    nf4_patch.enable(lora="fused")
    for part in ("lora_A", "lora_B"):
        y = model(x)
        with torch.no_grad():
            getattr(layer_of(model), part)["default"].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_an_input_that_is_overwritten_before_the_backward(device):
    """Without the patch, adapters in fp32 multiply an fp32 copy of x, so x itself may change."""
    model, x = adapted(device, adapter=FP32), inputs(device)

    def overwritten():
        model.zero_grad()
        hidden = x * 2
        y = model(hidden)
        with torch.no_grad():
            hidden.zero_()
        y.backward(gradient_of(y))
        return [each.grad for each in model.parameters() if each.grad is not None]

    want = overwritten()
    nf4_patch.enable(lora="fused")
    assert_close(overwritten(), want)
    assert len(want) == 2 and counters.hits(TARGET)


def test_a_kernel_that_fails_leaves_the_product_right(device, monkeypatch):
    model, x = adapted(device), inputs(device)
    want = step(model, x)

    def failing(self, *_):
        return Reason.KERNEL_FAILED

    nf4_patch.enable(lora="fused")
    monkeypatch.setattr(Dequantizer, "run", failing)
    assert_close(step(model, x), want)
    assert fallbacks(TARGET) == {Reason.KERNEL_FAILED: 2}
