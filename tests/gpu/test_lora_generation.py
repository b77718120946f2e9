"""Few rows with a LoRA adapter on the GPU: the two launches alone, in a CUDA graph, and inside generate()."""

from __future__ import annotations

import pytest
import torch
from fused_matmul import CUDA, error, exact, measured
from oracle import layout_of, quantized
from target import fallbacks

import nf4_patch
from benchmarks.models import LINEARS, Shape, build_4bit, config_of
from nf4_patch.matmul import adapter, choice
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, measured]
TARGET = "peft.tuners.lora.bnb.Linear4bit.forward"
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (2048, 2064), (1000, 4112))


def factors(n, k, rank, dtype, size=0.02):
    generator = torch.Generator(CUDA).manual_seed(rank)
    a = torch.randn(rank, k, device=CUDA, generator=generator) * k**-0.5
    b = torch.randn(n, rank, device=CUDA, generator=generator) * size
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize(("rank", "dtype"), [(16, BF16), (8, FP32), (20, BF16), (32, FP32), (64, BF16), (128, BF16)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_as_accurate_as_peft(n, k, rank, dtype):
    """Try the kernel of every row count, with a small adapter and with an adapter whose product is larger than the base product."""
    packed, state = quantized((n, k), BF16, CUDA)
    weight = layout_of(packed, state)
    truth_weight, bias = exact(weight), torch.randn(n, device=CUDA).to(BF16)
    served = 0
    for m in (1, 5, 8, 13, 16, 24, 32, 33, 48, 64):
        x = torch.randn(m, k, device=CUDA).to(BF16)
        config = choice.config_for(0, m, n, k)
        a, b = factors(n, k, rank, dtype, 0.02 if m % 2 else 2)
        if config is None or not adapter.supports(x, m, n, a, b):
            continue
        served += 1
        got = adapter.resolve(x, weight, bias, config, a).add(x, a, b, 0.75)
        truth = x.double() @ truth_weight.t() + bias.double() + 0.75 * (x.double() @ a.double().t()) @ b.double().t()
        base = torch.nn.functional.linear(x, truth_weight.to(BF16), bias)
        stock = base + ((x.to(dtype) @ a.t() @ b.t()) * 0.75).to(BF16)
        assert error(got, truth) <= 1.01 * error(stock, truth), (m, error(got, truth), error(stock, truth))
    assert served >= 5


def adapted(layers=2, dtype=BF16, rank=16):
    """Return a random Llama in 4 bits with an adapter on all linear layers."""
    config = config_of(Shape(2048, 4096, layers, 16, 4), BF16)
    options = {"r": rank, "lora_alpha": rank, "target_modules": list(LINEARS)}
    model = peft.get_peft_model(build_4bit(config, CUDA).eval(), peft.LoraConfig(**options)).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn_like(parameter, dtype=FP32) * parameter.shape[1] ** -0.5).to(dtype)
    return model


def step(model):
    """Run an optimizer step in place."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(2)
    for p in parameters:
        p.grad = torch.randn_like(p)
    torch.optim.SGD(parameters, lr=0.02).step()


def layer_of(model):
    return model.base_model.model.model.layers[0].mlp.up_proj


def kernel_hits():
    return sum(c.hits for key, c in counters.hit_counters.items() if key[3] == "fused matmul with LoRA")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_cuda_graph_follows_its_input_and_the_adapter(dtype, auto):
    layer = layer_of(adapted(1, dtype))
    x = torch.randn(8, 1, 2048, device=CUDA).to(BF16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, layer(x))
        x.mul_(-2)
        layer.lora_A["default"].weight.mul_(1.5)
        layer.lora_B["default"].weight.add_(0.1)
    assert kernel_hits() == 5


@torch.no_grad()
def test_the_first_call_inside_a_capture_is_pefts(monkeypatch):
    """No kernel compiles during a capture.

    So peft's layer runs, with bitsandbytes' matmul or the fused matmul, and the call is counted.
    """
    layer = layer_of(adapted(1, rank=24))
    x = torch.randn(3, 1, 2048, device=CUDA).to(BF16)
    want = layer(x)
    nf4_patch.enable(matmul="auto")
    layer.base_layer(x)
    monkeypatch.setattr(adapter, "_kernels", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert error(y, want) < 1e-2 and fallbacks(TARGET) == {Reason.GRAPH_CAPTURE: 1}


def generated(model, prompt, **options):
    """Return the logits of each new token, [tokens, batch, vocabulary], and the tokens."""
    result = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, min_new_tokens=24, do_sample=False,
        cache_implementation="static", return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return torch.stack(result.logits).float(), result.sequences[:, prompt.shape[1] :]


def assert_alike(got, want):
    """Check that logits agree up to the first token that differs. After it, the inputs differ."""
    (logits, tokens), (stock, stock_tokens) = got, want
    same = (tokens == stock_tokens).long().cumprod(1).bool()
    compared = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1).t()
    assert error(logits[compared], stock[compared].double()) < 3e-2
    assert compared.float().mean() > 0.3


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("option", ["off", "fused"])
def test_generate_compiled_with_a_static_cache(batch, option):
    """transformers compiles the decode step with as many graphs and breaks as without the patch. An optimizer step adds none."""
    from torch._dynamo.utils import counters as dynamo

    model = adapted()
    prompt = torch.randint(0, 512, (batch, 6), generator=torch.Generator().manual_seed(0)).to(CUDA)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]

    def before_and_after_a_step():
        """Return the results, and the numbers of graphs and breaks before and after an optimizer step."""
        torch._dynamo.reset()
        dynamo.clear()
        results, counts = [], []
        for each in range(2):
            for p, values in zip(trained, start, strict=True):
                p.data.copy_(values)
            if each:
                step(model)
            results.append(generated(model, prompt))
            counts.append((dynamo["stats"]["unique_graphs"], sum(dynamo["graph_break"].values())))
        return results, counts

    nf4_patch.disable()
    stock, allowed = before_and_after_a_step()
    nf4_patch.enable(matmul="auto", lora=option)
    counters.reset()
    results, counts = before_and_after_a_step()
    assert counts == allowed and counts[0][0] > 0
    assert kernel_hits() >= 14
    for got, want in zip(results, stock, strict=True):
        assert_alike(got, want)
    assert error(results[1][0][0], results[0][0][0].double()) > 0.05


@torch.no_grad()
def assert_greedy(model, prompts, results):
    """Check that each token has the largest logit in peft's own forward over the whole sequence, except for rounding."""
    assert len(results) == len(prompts)
    for prompt, tokens in zip(prompts, results, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]], device=CUDA)).logits[0].float()
        found = logits[len(prompt) - 1 : -1]
        chosen = found.gather(1, torch.tensor(tokens, device=CUDA)[:, None])[:, 0]
        assert len(tokens) == 24 and (found.amax(1) - chosen).max() < 0.2 * found.std()


@pytest.mark.parametrize("in_graphs", [False, True])
def test_continuous_batching(in_graphs):
    """Run transformers' ``generate_batch`` eagerly and in its CUDA graphs.

    The next rollout uses the adapter of the last optimizer step.
    """
    generation = pytest.importorskip("transformers.generation")
    if not hasattr(generation, "ContinuousBatchingConfig"):
        pytest.skip("transformers has no ContinuousBatchingConfig")
    model = adapted()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (3, 70, 12, 5, 9)]
    greedy = generation.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def rollout():
        config = generation.ContinuousBatchingConfig(use_cuda_graph=in_graphs, num_blocks=32, max_batch_tokens=256)
        with torch.no_grad():
            found = model.generate_batch(
                prompts, generation_config=greedy, continuous_batching_config=config, progress_bar=False
            )
        return [output.generated_tokens for output in found.values()]

    first = []
    for _ in range(2):
        nf4_patch.enable(matmul="auto")
        counters.reset()
        found = rollout()
        assert kernel_hits() > 14
        nf4_patch.disable()
        assert_greedy(model, prompts, found)
        assert found != first
        first = found
        step(model)
