"""python -m benchmarks.generation_lora: a decode step of Llama 3.1 8B layers in 4 bits with an unmerged LoRA adapter.

A step computes one token per sequence at position 256 of a static cache of 512 positions. Weights and adapters are
random. Every side is first compared with the same layers in fp32. Then transformers' ``generate`` compiles the step
itself. The row says how often the step compiled and how often a graph broke. The JSON file is written again after each
row, so an interrupted run loses no row.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import LINEARS, LLAMA_8B, build_4bit, config_of
from benchmarks.products import error, exact
from benchmarks.timing import Call, capture, gpu_times, kernels, machine
from nf4_patch.matmul import adapter as launches
from nf4_patch.matmul.choice import config_for
from nf4_patch.patching.quant_state import weight_of
from nf4_patch.tools.patch import patch

SIDES = ("bnb", "auto", "auto plain", "dense", "enable", "bnb plain", "enable plain")  # plain: without the adapter
MEASURED = ("steps", "compiled", "generate", "kernels")
POSITION, POSITIONS = 256, 512
PROMPT, TOKENS = 16, 96  # per sequence of ``generate``
VOCABULARY = 512
RANK = 16
PROFILED = (8, 32)  # batches
GROUPS = {  # by parts of the kernel's name, in this order; LoRA's products in peft are dense
    "attention": ("flash", "fmha", "sdpa", "attention", "softmax", "cutlassf"),
    "base": ("matmul_4bit", "gemm_4bit", "gemv_4bit", "dequantize", "sum_split_k", "4bit"),
    "LoRA, first product": ("lora_inner",),
    "dense products": ("gemm", "gemv", "nvjet", "cublas", "splitkreduce", "xmma"),
}


class Step:
    """A decode step of ``model`` (transformers' LlamaModel without a head), always at the same position."""

    def __init__(self, model: Any, config: Any, batch: int, dtype: torch.dtype, device: str):
        from transformers import StaticCache

        self.model, self.cache = model, StaticCache(config=config, max_cache_len=POSITIONS)
        generator = torch.Generator(device).manual_seed(batch)
        hidden = (batch, 1, config.hidden_size)
        self.x = torch.randn(hidden, generator=generator, device=device).bfloat16().to(dtype)
        model(inputs_embeds=self.x, past_key_values=self.cache)  # allocates the cache
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device).bfloat16())

    def __call__(self) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(POSITION)
        result: Tensor = self.model(inputs_embeds=self.x, past_key_values=self.cache).last_hidden_state
        return result


def median_ms(call: Call, count: int, rounds: int = 5) -> float:
    """Return the median milliseconds of a call on the GPU, over rounds of ``count`` consecutive calls."""
    found = []
    call()
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return statistics.median(found)


def by_kernel(call: Call) -> dict[str, Any]:
    """Return the milliseconds and launches of each group of kernels, and of each kernel."""
    found: dict[str, Any] = {"groups": {}, "kernels": {}}
    for name, ms in kernels(call):
        group = next((group for group, parts in GROUPS.items() if any(part in name.lower() for part in parts)), "rest")
        for total in (found["groups"].setdefault(group, {}), found["kernels"].setdefault(name[:70], {})):
            total |= {"ms": total.get("ms", 0) + ms, "launches": total.get("launches", 0) + 1}
    return found


class Bench:
    """All sides, built one after another, and the file of results."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.begin = options, time.monotonic()
        self.gpu = torch.cuda.is_available()
        self.device = "cuda" if self.gpu else "cpu"
        self.rows: list[dict[str, Any]] = []
        sizes: dict[str, Any] = {"num_hidden_layers": options.layers, "vocab_size": VOCABULARY}
        if options.tiny:
            sizes |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        self.config = config_of(LLAMA_8B._replace(**sizes), torch.bfloat16)
        self.truths: dict[tuple[int, bool], Tensor] = {}  # fp32 hidden states, by batch and with or without the adapter
        self.tokens: dict[tuple[str, int], Any] = {}

    def run(self) -> int:
        """Measure what the options name. Return the exit code."""
        options = self.options
        batches = sorted(options.batches, key=lambda batch: batch not in PROFILED)
        self.add({"row": "build"}, self.build)
        self.add({"row": "truth"}, self.truth)
        self.add({"row": "merge"}, self.merge)
        if "steps" in options.what:
            for batch in batches:
                for side in SIDES:
                    self.add({"row": "step", "side": side, "batch": batch}, self.step)
        if self.gpu and "compiled" in options.what:
            for batch in options.compiled:
                for side in ("auto", "bnb", "auto plain", "dense"):
                    self.add({"row": "compiled", "side": side, "batch": batch}, self.compiled, least=30)
        if "generate" in options.what:
            for batch in options.compiled:
                for side in ("bnb", "auto"):
                    self.add({"row": "generate", "side": side, "batch": batch}, self.generate, least=30)
        if self.gpu and "kernels" in options.what:
            for batch in options.batches:
                for layer in ("q_proj", "k_proj", "gate_proj", "down_proj"):
                    self.add({"row": "kernels", "layer": layer, "batch": batch}, self.kernels)
        self.summary()
        return int(any("failed" in row for row in self.rows))

    @torch.no_grad()
    def add(self, row: dict[str, Any], measure: Callable[..., dict[str, Any]], least: float = 0) -> None:
        """Add the results of ``measure`` to a row, and write the row.

        An error becomes the row's result, so that the other rows are measured.

        Args:
            row: the fields that describe the row. All of them but "row" are the arguments of ``measure``.
            least: the least seconds that have to be left. With fewer, nothing is measured.
        """
        if self.begin + self.options.seconds - time.monotonic() < least:
            return
        try:
            row |= measure(**{name: value for name, value in row.items() if name != "row"})
        except Exception as problem:
            row |= {"failed": f"{type(problem).__name__}: {problem}"[:400], "trace": traceback.format_exc()[-900:]}
        row["at_s"] = round(time.monotonic() - self.begin, 1)
        self.rows.append(row)
        data = {"machine": vars(machine()) if self.gpu else None, "rows": self.rows}
        Path(self.options.json).write_text(json.dumps(data, indent=1))
        print(json.dumps(row), flush=True)

    # --- the models ---

    def build(self) -> dict[str, Any]:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEARS))  # type: ignore[call-arg]
        self.peft: Any = get_peft_model(build_4bit(self.config, self.device).eval(), config).eval()
        torch.manual_seed(1)
        for name, parameter in self.peft.named_parameters():
            if "lora_" in name:
                scale = parameter.shape[1] ** -0.5 if "lora_A" in name else 0.02
                values = torch.randn_like(parameter, dtype=torch.float32) * scale
                parameter.data = values.to(getattr(torch, self.options.adapter))
            parameter.requires_grad_(False)
        self.model = self.peft.base_model.model.model
        return {"layers": self.options.layers, "torch": torch.__version__}

    def dense(self, dtype: torch.dtype, adapter: bool) -> Any:
        """Return the layers with dense weights, into which the adapter is merged. fp32 weights are code * scale,
        without rounding.
        """
        from transformers import LlamaForCausalLM

        def weight(name: str) -> Tensor:
            layer = self.model.get_submodule(name.removesuffix(".weight"))
            if not hasattr(layer, "base_layer"):
                return layer.weight.data.to(dtype)
            base = layer.base_layer.weight
            value = exact(weight_of(base.data, base.quant_state)).float()
            if adapter:
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                value += layer.scaling["default"] * (b.float() @ a.float())
            return value.to(dtype)

        with torch.device("meta"):
            model: Any = LlamaForCausalLM(self.config).model
        model.load_state_dict({name: weight(name) for name in model.state_dict()}, assign=True)
        model.rotary_emb = self.model.rotary_emb
        return model.eval()

    def truth(self) -> dict[str, Any]:
        """Compute each batch's hidden states in fp32, with and without the adapter."""
        torch.backends.cuda.matmul.allow_tf32 = False
        for adapter in (True, False):
            model = self.dense(torch.float32, adapter)
            for batch in {*self.options.batches, *self.options.compiled}:
                self.truths[batch, adapter] = Step(model, self.config, batch, torch.float32, self.device)()
            del model
            gc.collect()
            if self.gpu:
                torch.cuda.empty_cache()
        return {}

    def merge(self) -> dict[str, Any]:
        self.merged = self.dense(torch.bfloat16, True)
        return {}

    @contextlib.contextmanager
    def active(self, side: str) -> Iterator[Any]:
        """Yield the model of a side while the side's patch is on, with or without the adapter."""
        if side == "dense":
            yield self.merged
            return
        kind = side.split()[0]
        without = self.peft.disable_adapter() if "plain" in side else contextlib.nullcontext()
        with patch(kind != "bnb", **({"matmul": "auto"} if kind == "auto" else {})), without:
            yield self.model

    # --- what is measured ---

    def step(self, side: str, batch: int, compiled: bool = False) -> dict[str, Any]:
        """Compare a step with fp32, and time it with a CUDA graph and without."""
        code = "compiled" if compiled else "eager"
        result: dict[str, Any] = {"layers": self.options.layers, "code": code}
        with self.active(side) as model:
            step = Step(model, self.config, batch, torch.bfloat16, self.device)
            if compiled:
                torch._dynamo.reset()
                step.model = torch.compile(model, dynamic=False)
                begin = time.monotonic()
                step()
                result["compile_s"] = round(time.monotonic() - begin, 1)
            found = step()
            result["error"] = error(found, self.truths[batch, "plain" not in side])
            if not self.gpu:
                return result
            for _ in range(2):
                step()
            graph = capture([step])
            again = float((step() - found).abs().max())
            ms = median_ms(graph.replay, 10)
            result |= {"graph_ms": round(ms, 4), "tokens_s": round(batch / ms * 1e3, 1), "differs_between_runs": again}
            if not compiled:
                result["eager_ms"] = round(median_ms(step, 3, 3), 3)
            if batch in PROFILED:
                graph.replay()
                result["profile"] = by_kernel(graph.replay)
        return result

    def compiled(self, side: str, batch: int) -> dict[str, Any]:
        return self.step(side, batch, compiled=True)

    def generate(self, side: str, batch: int) -> dict[str, Any]:
        """Call greedy ``generate`` twice with a static cache, for which transformers compiles the step.

        ``tokens_like_bnb`` is how many tokens at the beginning of each sequence equal those of the side "bnb".
        """
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters
        counts.clear()
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(0, VOCABULARY, (batch, PROMPT), generator=generator).to(self.device)
        result: dict[str, Any] = {}
        with self.active(side):
            for call in ("first", "second"):
                begin = time.monotonic()
                tokens = self.peft.generate(
                    input_ids=prompt, attention_mask=torch.ones_like(prompt), cache_implementation="static",
                    do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS,
                )[:, PROMPT:].tolist()  # fmt: skip
                seconds = time.monotonic() - begin
                result[call] = {
                    "s": round(seconds, 2), "tokens_s": round(batch * TOKENS / seconds, 1),
                    "compilations": counts["stats"]["unique_graphs"], "graph_breaks": sum(counts["graph_break"].values()),
                }  # fmt: skip
        self.tokens[side, batch] = tokens
        pairs = zip(tokens, self.tokens.get(("bnb", batch), tokens), strict=True)
        alike = [next((i for i in range(TOKENS) if ours[i] != theirs[i]), TOKENS) for ours, theirs in pairs]
        return result | {"tokens_like_bnb": alike}

    def kernels(self, layer: str, batch: int) -> dict[str, Any]:
        """Time the fused matmul with the adapter and without, in microseconds."""
        part = "self_attn" if layer[0] in "qk" else "mlp"
        layers = [self.model.get_submodule(f"layers.{i}.{part}.{layer}") for i in range(self.options.layers)]
        k, n = layers[0].in_features, layers[0].out_features
        x = torch.randn(batch, k, device=self.device).bfloat16()
        config: Any = config_for(x.get_device(), batch, n, k)
        calls: dict[str, list[Call]] = {"base": [], "with adapter": []}
        for each in layers:
            base, a, b = each.base_layer, each.lora_A["default"].weight, each.lora_B["default"].weight
            weight = weight_of(base.weight.data, base.weight.quant_state)
            launch = launches.resolve(x, weight, None, config, a)
            calls["base"].append(partial(base, x))
            calls["with adapter"].append(partial(launch.add, x, a, b, 1.0))
        want = x.double() @ exact(weight).t() + (x.double() @ a.double().t()) @ b.double().t()
        worst = error(launch.add(x, a, b, 1.0), want)
        with patch(True, matmul="auto"):
            times = gpu_times({name: each * 3 for name, each in calls.items()}, rounds=6)
        us = {name: round(each.median, 2) for name, each in times.items()}
        return {"shape": f"{n}x{k}", "error": worst, "us": us}

    def summary(self) -> None:
        """Print each side's speed-up over the other sides."""
        found = {(row["side"], row["batch"]): row for row in self.rows if row["row"] == "step" and "graph_ms" in row}
        for (side, batch), row in found.items():
            bases = {other: found[other, batch] for other in ("bnb", "auto plain", "dense") if (other, batch) in found}
            ratios = {f"times as fast as {other}": base["graph_ms"] / row["graph_ms"] for other, base in bases.items()}
            words = ", ".join(f"{ratio:.3f} {name}" for name, ratio in ratios.items())
            print(f"{batch:3} {side:16} {row['graph_ms']:8.3f} ms  error {row['error']:.5f}  {words}", flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--compiled", type=int, nargs="*", default=[8, 32], help="batches to compile, last")
    parser.add_argument("--what", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--adapter", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of A and B")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--json", default="generation_lora.json")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(Bench(arguments()).run())
