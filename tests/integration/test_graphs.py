"""torch.compile of a whole QLoRA model makes the same graphs, breaks and recompiles as without the patch.

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
from torch._functorch.aot_autograd import make_boxed_func

import nf4_patch
from benchmarks.checkpoint import load_4bit

GPU = torch.cuda.is_available()
OURS = "nf4_patch.dequantize_nf4.default"
THEIRS = ("bitsandbytes.dequantize_blockwise.default", "aten.add.Tensor", "bitsandbytes.dequantize_4bit.default")
WEIGHTS = 7 - 3  # of the backward: q, k and v of the only layer have an input that needs no gradient


def qlora(checkpoint: str, device: torch.device) -> torch.nn.Module:
    model = load_4bit(checkpoint, device)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")).train()


def trained(checkpoint: str, device: torch.device, lengths: list[int], **options: Any) -> dict[str, Any]:
    """Return the losses and gradients of one step per length, and Dynamo's counts."""
    torch._dynamo.reset()
    counters.clear()
    model = qlora(checkpoint, device)
    if options.pop("checkpointed", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    counter, graphs = None, []
    if "mode" not in options:  # a mode is Inductor's own
        counter = options["backend"] = CompileCounterWithBackend(options.get("backend", kept(graphs)))
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
    return {"losses": losses, "gradients": gradients, "counts": counts, "operators": graphs}


def kept(graphs: list[Counter[str]]) -> Any:
    """Return a backend that counts each operator in the partitioned graphs of forward and backward, which Inductor would get."""

    def keep(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep)


def compare(checkpoint: str, device: torch.device, lengths: list[int], **options: Any) -> dict[str, Any]:
    """Compare losses, gradients and counts without the patch and with it. Return the results of the patched training.

    The bits are equal, except for gradients that Inductor computes on a GPU. There, two compilations without the patch
    differ in 5 of 42 LoRA gradients, by up to 1e-7 of their norm (H200, torch 2.11). The cause is unknown, and
    Inductor's deterministic mode does not help. So the limit there is bf16's rounding.
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
    assert max(apart) <= (2**-8 if options.get("backend") == "inductor" or "mode" in options else 0)
    assert patched["counts"] == stock["counts"]
    assert len(patched["operators"]) == len(stock["operators"])
    for ours, without in zip(patched["operators"], stock["operators"], strict=True):
        count = ours[OURS]  # one op for three, and not another one more, less or elsewhere split
        assert ours - without == Counter({OURS: count} if count else {})
        assert without - ours == Counter(dict.fromkeys(THEIRS, count) if count else {})
    return patched


@pytest.mark.full
@pytest.mark.parametrize("backend", [{}, *[{"backend": "inductor"}] * GPU], ids=str)
def test_the_whole_model_is_one_graph_and_a_second_for_other_lengths(checkpoint, device, backend):
    """A length that repeats compiles nothing. A second length compiles once, with a symbolic size. The backward runs patched."""
    found = compare(checkpoint, device, [48, 48, 56, 64], fullgraph=True, **backend)
    counts = found["counts"]
    assert counts["breaks"] == 0 and counts["graphs"] == counts["compilations"] == 2
    assert backend or [graph[OURS] for graph in found["operators"]] == [0, WEIGHTS] * 2


@pytest.mark.full
def test_checkpointed_model(checkpoint, device):
    assert compare(checkpoint, device, [48] * 3, checkpointed=True)["counts"]["graphs"] >= 1


@pytest.mark.gpu
def test_reduce_overhead(checkpoint, device):
    compare(checkpoint, device, [512] * 6, mode="reduce-overhead")
