"""Mixtures of experts with two layers of real size on the GPU.

A hundred steps are bit-identical, and no dense stack is saved. Other tests cover loading, and what only a GPU shows:
its grouped products, autocast, fp16, sizes beyond 2^31, streams, and Liger's own kernels.
"""

from __future__ import annotations

import gc
import importlib

import bitsandbytes.functional as F
import pytest
import torch
import transformers
from target import linear
from tiny_experts import experts_of, ids_of, in_4bit, loaded, model_of, random_model, same, saved, with_lora
from tiny_experts import step as step_of
from torch.nn.functional import silu

import nf4_patch
from benchmarks import offload, training
from benchmarks.models import LINEARS
from benchmarks.products import error
from nf4_patch.moe import launch
from nf4_patch.moe.forward import Order

pytestmark = pytest.mark.gpu


def train(model, patch: bool, steps: int, cache: str = "off"):
    """Train, and return the losses, the adapters and the peak memory of a step."""
    nf4_patch.enable(experts="4bit", cache=cache) if patch else nf4_patch.disable()
    adapters = training.optimizer_of(model).param_groups[0]["params"]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    losses = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        tokens = torch.randint(3, 1000, (1, 512), generator=generator).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    nf4_patch.disable()
    return torch.stack(losses), [a.detach().clone() for a in adapters], torch.cuda.max_memory_allocated()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_a_hundred_steps_to_the_bit_and_nothing_dense_is_saved(name, monkeypatch):
    """Compare nf4_patch's forward in PyTorch with transformers' forward."""
    monkeypatch.setattr(launch, "supports", lambda tensor: False)
    model = training.peft_model(offload.config_of(offload.Setting(name, layers=2)), LINEARS[:4])
    model.get_base_model().set_attn_implementation("eager")  # cuDNN's backward may not repeat next to other work (H200)
    for checkpointing in (True, False):
        if not checkpointing:
            model.gradient_checkpointing_disable()
        want, trained, stock = train(model, False, 100)
        got, ours, peak = train(model, True, 100)
        if not torch.equal(got, want):
            assert torch.equal(train(model, False, 100)[0], want), "it does not repeat without the patch either"
        print(f"\n{name}, checkpointing {checkpointing}: peak {stock / 2**30:.2f} -> {peak / 2**30:.2f} GiB")
        assert torch.equal(got, want)
        assert all(map(torch.equal, ours, trained))
        hits = nf4_patch.status().cache.hits
        got, ours, _ = train(model, True, 100, cache="8GiB")  # all of them fit
        assert nf4_patch.status().cache.hits > hits
        assert torch.equal(got, want)
        assert all(map(torch.equal, ours, trained))
        assert want[-1] != want[0]
        stacks = [
            2 * chain[0].quant_state.shape.numel()
            for module in model.modules()
            for chain in getattr(module, "parametrizations", {}).values()
        ]
        in_use = max(stacks)  # one is dense at a time
        assert peak <= 1.001 * (stock if checkpointing else stock - sum(stacks) + in_use)


SIZES = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 4}


# Packed while transformers loads them: the same bits as on the CPU, and no more memory than promised.
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize(
    ("places", "storage"), [({"": 0}, torch.uint8), ({"": 0}, torch.bfloat16), ("auto", torch.uint8)], ids=str
)
def test_packed_while_loading(name, places, storage, tmp_path):
    """The GPU never holds more than the packed model, two stacks in 16 bits and an eighth of a stack."""
    sizes = SIZES if name == "qwen3" else {"hidden_size": 1024, "intermediate_size": 512, "num_local_experts": 32}
    stacks = saved(random_model(name, **sizes), tmp_path)
    largest = max(stack.nbytes for stack in stacks.values())
    gc.collect()  # models of earlier tests
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with nf4_patch.enabled(experts="4bit"):
        model = loaded(tmp_path, quantization_config=in_4bit(bnb_4bit_quant_storage=storage), device_map=places)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    if torch.cuda.device_count() == 1:
        assert held < sum(stack.nbytes for stack in stacks.values()) / 3
        assert peak <= held + 2.125 * largest
    for stack, dense in stacks.items():
        path, _, parameter = stack.rpartition(".")
        chain = model.get_submodule(path).parametrizations[parameter]
        packed, _ = F.quantize_4bit(dense.to(chain.original.device), compress_statistics=True, quant_type="nf4")
        assert torch.equal(chain.original.view(torch.uint8).view(-1), packed.view(-1))
    ids = torch.arange(24, device="cuda").view(2, 12)
    wanted = model(ids).logits
    assert torch.isfinite(wanted).all()
    if places != "auto":  # to the host and back, as whatever dtype the bytes are stored
        assert torch.equal(model.cpu().cuda()(ids).logits, wanted)


# --- our forward beside transformers' ---


@pytest.fixture
def forwards(patched, monkeypatch):
    """Return a function that sets whether the forward runs in kernels or, as transformers' does, in PyTorch."""
    patched.enable(experts="4bit")

    def choose(ours: bool) -> None:
        monkeypatch.setattr(launch, "supports", lambda tensor: ours)

    return choose


def fixed(router, inputs, output):
    """Hook a router so that a token's place alone decides the experts of the token. Rounding can then not change the choice."""
    *others, ids = output
    slots = torch.arange(ids.numel(), device=ids.device) * 5 % router.weight.shape[0]
    return *others, slots.view(ids.shape).to(ids.dtype)


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def test_fp16_is_finite_where_transformers_forward_is(forwards):
    """Run fifteen steps under a GradScaler. The first scales overflow."""

    def steps(ours):
        forwards(ours)
        model = with_lora(model_of("qwen3", torch.float16, lora=False))
        for router in routers_of(model):
            router.register_forward_hook(fixed)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.data = parameter.data.float()
        optimizer, scaler = torch.optim.AdamW(trained, lr=1e-3), torch.amp.GradScaler("cuda", init_scale=2.0**30)
        finite, losses = [], []
        for _ in range(15):
            with torch.autocast("cuda", torch.float16):
                loss = model(input_ids=ids_of(), labels=ids_of()).loss
            scaler.scale(loss).backward()
            finite.append(all(bool(parameter.grad.isfinite().all()) for parameter in trained))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return finite, losses

    (found, losses), (want, theirs) = steps(True), steps(False)
    print(found, losses, theirs)
    assert found == want and not all(want) and any(want)
    assert losses == pytest.approx(theirs, rel=2**-6)


# --- PyTorch's grouped product ---


def test_a_grouped_product_of_a_transposed_view():
    """The product equals that of a contiguous copy, and the products of single experts (pytorch #186365).

    Both operands are views, as in forward and backward.
    """
    grouped = transformers.integrations.moe._grouped_mm
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        count, n, k = (int(torch.randint(1, 9, (), generator=generator)) * size for size in (1, 64, 64))
        sizes = torch.randint(0, 70, (count,), generator=generator)
        ends = sizes.cumsum(0).int().cuda()
        weight = torch.randn(count, n, k, generator=generator).cuda().bfloat16()
        for stack in (weight.mT, weight):
            x = torch.randn(int(sizes.sum()), stack.shape[1], generator=generator).cuda().bfloat16()
            if not len(x):
                continue
            parts = [rows.float() @ each.float() for rows, each in zip(x.split(sizes.tolist()), stack, strict=True)]
            exact = torch.cat(parts)
            copy = grouped(x, stack.contiguous(), offs=ends)
            for found in (grouped(x, stack, offs=ends), copy):
                assert error(found, exact) < 2**-8, (count, n, k, sizes)


# --- beyond 2^31 elements ---

WIDTH, TOP_K = 2048, 8
TOKENS = 2**31 // (WIDTH * TOP_K) + 64


@pytest.fixture
def far():
    """Return the order of the rows of TOKENS tokens, and the tokens that have the first and the last rows."""
    generator = torch.Generator().manual_seed(0)
    order = Order.of(torch.rand(TOKENS, 16, generator=generator).topk(TOP_K).indices.cuda(), 16)
    assert len(order.slot_of) * WIDTH > 2**31
    yield order, torch.cat([order.tokens()[:16], order.tokens()[-16:]])
    torch.cuda.empty_cache()


def filled(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def test_combining_rows_beyond_int32(far):
    order, tokens = far
    rows, weights = filled(len(order.slot_of), WIDTH), torch.rand(TOKENS, TOP_K, device="cuda")
    found = launch.combine(rows, order.row_of, torch.float32, weights, rows)
    want = (rows[order.row_of[tokens]].float() * (1 + weights[tokens][..., None])).sum(dim=1)
    assert error(found[tokens], want) < 1e-6


def test_weighing_rows_beyond_int32(far):
    order, _ = far
    rows, gradient = filled(len(order.slot_of), WIDTH), filled(len(order.slot_of), WIDTH)
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    found, of_weights = launch.weigh(gradient, None, rows, order.slot_of, weights, True)
    for part in (slice(0, 16), slice(-16, None)):
        slots, of = order.slot_of[part], gradient[part].float()
        assert error(found[part], of * weights.flatten()[slots][:, None]) < 2**-8
        assert error(of_weights.flatten()[slots], (of * rows[part].float()).sum(dim=1)) < 1e-5


def test_gating_rows_beyond_int32():
    rows = filled(2**31 // (2 * WIDTH) + 64, 2 * WIDTH)
    (found, _), of_rows = launch.silu_and_mul(rows), launch.silu_and_mul_backward(rows, rows[:, :WIDTH].contiguous())
    for part in (slice(0, 16), slice(-16, None)):
        inputs = rows[part].float().requires_grad_()
        want = silu(inputs[:, :WIDTH]) * inputs[:, WIDTH:]
        (gradient,) = torch.autograd.grad(want, inputs, inputs[:, :WIDTH].detach())
        assert error(found[part], want.detach()) < 2**-8 and error(of_rows[part], gradient) < 2**-8


def test_grouped_products_of_rows_beyond_int32(far):
    """Run PyTorch's grouped products, first with a large input, then with a large output."""
    order, _ = far
    for width, out in ((WIDTH, 64), (64, WIDTH)):
        x, weight = filled(len(order.slot_of), width), filled(16, width, out)
        found = transformers.integrations.moe._grouped_mm(x, weight, offs=order.ends)
        for part, expert in ((slice(0, 16), 0), (slice(-16, None), 15)):
            assert error(found[part], x[part].float() @ weight[expert].float()) < 2**-8
        del x, found


# --- streams, Liger ---


def fields_of(layer):
    state = layer.weight.quant_state
    return layer.weight, state.absmax, state.state2.absmax, state.offset


@pytest.mark.parametrize("cache", ["off", "1GiB"])
def test_two_buffers_that_a_stream_refills(cache, patched):
    """Layers alternate between two places in memory (bitsandbytes #2034). Each layer has the right output and gradient."""
    device = torch.device("cuda")
    layers = [linear(device, 1024, 1024, seed=seed) for seed in range(8)]
    x = torch.randn(600, 1024, dtype=torch.bfloat16, device=device, requires_grad=True)

    def run(layer):
        output = layer(x)
        return output.detach(), torch.autograd.grad(output.float().square().sum(), x)[0]

    patched.disable()
    want = [run(layer) for layer in layers]
    hosts = [[value.detach().cpu().pin_memory() for value in fields_of(layer)] for layer in layers]
    patched.enable(experts="4bit", cache=cache)
    places = [linear(device, 1024, 1024, seed=seed) for seed in (8, 9)]
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(3):
        for index, host in enumerate(hosts):
            layer = places[index % 2]
            side.wait_stream(main)
            with torch.cuda.stream(side), torch.no_grad():
                for place, value in zip(fields_of(layer), host, strict=True):
                    place.copy_(value, non_blocking=True)
            main.wait_stream(side)
            assert all(map(torch.equal, run(layer), want[index]))


@pytest.mark.parametrize("streams", [False, True], ids=["one stream", "two streams"])
def test_trls_activation_offloading_gets_nothing_dense(streams, patched):
    """Gradients are bit-identical to those of a step without offloading, also with a reentrant checkpoint inside."""
    offloading = pytest.importorskip("trl.models.activation_offloading")
    patched.enable(experts="4bit")
    model = with_lora(model_of("qwen3", lora=False))
    model.enable_input_require_grads()
    want = step_of(model)
    names = {name for module in experts_of(model) for name in getattr(module, "parametrizations", {})}
    dense = {tuple(sorted(getattr(module, name).shape)) for module in experts_of(model) for name in names}
    for keywords in (None, {"use_reentrant": True}):
        if keywords:
            model.gradient_checkpointing_enable(keywords)
        hooks, offloaded = offloading.OffloadActivations(use_streams=streams, min_offload_size=0), []
        pack = hooks.pack_hook

        def recorded(tensor, pack=pack, offloaded=offloaded):
            offloaded.append((tensor.dtype, tuple(sorted(tensor.shape))))  # also a transposed stack
            return pack(tensor)

        hooks.pack_hook = recorded
        with hooks:
            found = step_of(model)
        assert same(found, want) and offloaded and dense
        assert not [(dtype, shape) for dtype, shape in offloaded if dtype is torch.uint8 or shape in dense]


OTHERS = {"rope": False, "rms_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


def test_with_ligers_own_kernels(patched, monkeypatch):
    """Experts in 16 bits train as with Liger and peft alone."""
    liger = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    monkeypatch.setattr(modeling, "Qwen3MoeExperts", modeling.Qwen3MoeExperts)
    patched.enable(experts="4bit")
    model = random_model("qwen3", device="cuda").train()
    liger.apply_liger_kernel_to_qwen3_moe(**OTHERS, model=model)
    model = with_lora(model)
    found = step_of(model)
    patched.disable()
    want, again = step_of(model), step_of(model)
    repeats = 2 * max(error(again[key], want[key]) for key in want)  # its sums may be atomic
    assert found.keys() == want.keys() and max(error(found[key], want[key]) for key in want) <= repeats
    assert all("Liger" in module._get_name() for module in experts_of(model))
