"""torch.compile of a whole QLoRA model: graphs, breaks and recompiles are those of stock bitsandbytes.

gpu/test_example_runs.py counts the same for Unsloth's compiled decoder layers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import nf4_patch
from benchmarks.checkpoint import load_4bit

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="before PyTorch 2.8 stock bitsandbytes and peft break the graph 42 times"
)
GPU = torch.cuda.is_available()
BACKEND = "inductor" if GPU else "aot_eager"


def qlora(checkpoint: str, device: torch.device) -> torch.nn.Module:
    model = load_4bit(checkpoint, device)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()


def trained(checkpoint: str, device: torch.device, lengths: list[int], **options: Any) -> dict[str, Any]:
    """Losses and gradients of one step a length, and what Dynamo counted on the way."""
    torch._dynamo.reset()
    counters.clear()
    model = qlora(checkpoint, device)
    if options.pop("checkpointed", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    counter = None
    if "mode" not in options:  # a mode is Inductor's own
        counter = options["backend"] = CompileCounterWithBackend(options.get("backend", BACKEND))
    compiled = torch.compile(model, **options)
    generator = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    for length in lengths:
        torch.compiler.cudagraph_mark_step_begin()  # reduce-overhead: what the last step returned may be overwritten
        ids = torch.randint(3, 512, (1, length), generator=generator).to(device)
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    counts = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": dict(counters["frames"]),
        "compilations": counter and counter.frame_count,
    }
    return {"losses": losses, "gradients": gradients, "counts": counts}


def compare(checkpoint: str, device: torch.device, lengths: list[int], **options: Any) -> dict[str, Any]:
    """Train without and with the patch; the same losses, gradients and counts. Returns the counts.

    The same bits, but of gradients that Inductor made on a GPU: there two compilations of stock bitsandbytes differ from
    each other, in 5 of 42 LoRA gradients by up to 1e-7 of their norm (H200, torch 2.11; why is not known, and Inductor's
    deterministic mode does not mend it). The bound there is bf16's rounding.
    """
    stock = trained(checkpoint, device, lengths, **options)
    with nf4_patch.enabled():
        patched = trained(checkpoint, device, lengths, **options)
    assert patched["losses"] == stock["losses"]
    pairs = list(zip(patched["gradients"], stock["gradients"], strict=True))
    apart = [((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item() for ours, theirs in pairs]
    print(
        f"{options}: {sum(map(bool, apart))} of {len(apart)} gradients differ, by at most {max(apart):.1e} of their norm"
    )
    assert max(apart) <= (2**-8 if GPU and options.get("backend") != "aot_eager" else 0)
    assert patched["counts"] == stock["counts"]
    return patched["counts"]


def test_whole_model_is_one_graph(checkpoint, device):
    counts = compare(checkpoint, device, [48] * 3, fullgraph=True)
    assert counts["graphs"] == 1 and counts["breaks"] == 0 and counts["compilations"] == 1


@pytest.mark.full
def test_checkpointed_model(checkpoint, device):
    counts = compare(checkpoint, device, [48] * 3, checkpointed=True)
    assert counts["graphs"] >= 1


@pytest.mark.parametrize("backend", sorted({BACKEND, "aot_eager"}))
def test_dynamic_shapes(checkpoint, device, backend):
    """The second length recompiles once with a symbolic size, the ones after it do not; with us as without."""
    counts = compare(checkpoint, device, [48, 56, 64], backend=backend)
    assert counts["breaks"] == 0 and counts["graphs"] == 2


def operations(checkpoint: str, device: torch.device, lengths: list[int]) -> list[Counter[str]]:
    """How often each operator stands in the partitioned graphs, a forward and a backward each: what Inductor gets."""
    graphs: list[Counter[str]] = []

    def keep(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    trained(checkpoint, device, lengths, backend=aot_autograd(fw_compiler=keep))
    return graphs


OURS = "nf4_patch.dequantize_nf4.default"
THEIRS = ("bitsandbytes.dequantize_blockwise.default", "aten.add.Tensor", "bitsandbytes.dequantize_4bit.default")
WEIGHTS = 7 - 3  # of the backward: q, k and v of the only layer have an input that needs no gradient


def test_the_op_is_in_the_backward_graph(checkpoint, device, patched):
    """The patch is not bypassed under compilation."""
    backward = operations(checkpoint, device, [32])[-1]
    assert backward[OURS] == WEIGHTS and not backward[THEIRS[-1]]


@pytest.mark.full
def test_the_graphs_differ_in_the_op_alone(checkpoint, device):
    """One op for the three of each dequantized weight, and not another operator more, less or elsewhere split."""
    stock = operations(checkpoint, device, [48, 56, 64])
    with nf4_patch.enabled():
        patched = operations(checkpoint, device, [48, 56, 64])
    assert len(stock) == len(patched) == 4  # forward and backward of a static and of a dynamic length
    for ours, without in zip(patched, stock, strict=True):
        count = WEIGHTS if OURS in ours else 0
        assert ours - without == Counter({OURS: count} if count else {})
        assert without - ours == Counter(dict.fromkeys(THEIRS, count) if count else {})
    assert sum(OURS in graph for graph in patched) == 2


@pytest.mark.gpu
def test_reduce_overhead(checkpoint, device):
    compare(checkpoint, device, [512] * 6, mode="reduce-overhead")
