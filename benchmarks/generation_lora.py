"""python -m benchmarks.generation_lora: a decode step of Llama 3.1 8B layers in 4 bits with an unmerged LoRA adapter.

A step computes one token per sequence at position 256 of a static cache of 512 positions. Weights and adapters are random. Every
side is first compared with the same layers in fp32. Then transformers' ``generate`` compiles the step itself, and the row says how
often it compiled and how often a graph broke. Results are appended to a JSON file after each row.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import LINEARS, LLAMA_8B, build_4bit, config_of
from benchmarks.timing import kernels, machine
from nf4_patch.matmul import adapter as launches
from nf4_patch.matmul.choice import config_for
from nf4_patch.patching.quant_state import weight_of
from nf4_patch.tools.matmul import exact
from nf4_patch.tools.patch import patch

POSITION, POSITIONS = 256, 512
TOKENS = 96  # per sequence of ``generate``
RANK = 16
GROUPS = (
    ("attention", ("flash", "fmha", "sdpa", "attention", "softmax", "cutlassF")),
    ("base", ("matmul_4bit", "gemm_4bit", "gemv_4bit", "dequantize", "dequantizeblock", "sum_split_k", "4bit")),
    ("LoRA, first product", ("lora_inner",)),
    ("dense products", ("gemm", "gemv", "nvjet", "cublas", "splitkreduce", "xmma")),
)  # by parts of the kernel's name, in this order; LoRA's products in peft are dense


class Step:
    """A decode step of ``model`` (transformers' LlamaModel without a head), always at the same position."""

    def __init__(self, model: Any, config: Any, batch: int, dtype: torch.dtype, device: str):
        from transformers import StaticCache

        self.model, self.cache = model, StaticCache(config=config, max_cache_len=POSITIONS)
        generator = torch.Generator(device).manual_seed(batch)
        hidden = (batch, 1, config.hidden_size)
        self.x = torch.randn(hidden, generator=generator, device=device).bfloat16().to(dtype)
        with torch.no_grad():
            model(inputs_embeds=self.x, past_key_values=self.cache)  # allocates the cache
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device).bfloat16())

    def __call__(self) -> torch.Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(POSITION)
        result: torch.Tensor = self.model(inputs_embeds=self.x, past_key_values=self.cache).last_hidden_state
        return result


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def median_ms(call: Callable[[], Any], count: int, rounds: int = 5) -> float:
    """Return the median milliseconds of a call on the GPU's clock, over rounds of ``count`` calls in a row."""
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


def by_kernel(step: Callable[[], Any]) -> dict[str, Any]:

    groups: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for name, ms in kernels(step):
        group = next((g for g, parts in GROUPS if any(part.lower() in name.lower() for part in parts)), "rest")
        for table, key in ((groups, group), (names, name[:70])):
            table.setdefault(key, []).append(ms)

    def total(table: dict[str, list[float]]) -> dict[str, Any]:
        order = sorted(table.items(), key=lambda item: -sum(item[1]))[:14]
        return {key: {"ms": round(sum(values), 4), "launches": len(values)} for key, values in order}

    return {"groups": total(groups), "kernels": total(names)}


class Bench:
    """All sides, built one after the other, and the file of results."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.begin = options, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.rows: list[dict[str, Any]] = []
        sizes: dict[str, Any] = {"num_hidden_layers": options.layers, "vocab_size": 512}
        if options.tiny:
            sizes |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        self.config = config_of(LLAMA_8B._replace(**sizes), torch.bfloat16)
        self.truths: dict[tuple[int, bool], torch.Tensor] = {}
        self.tokens: dict[tuple[str, int], Any] = {}

    def left(self) -> float:
        return float(self.options.seconds - (time.monotonic() - self.begin))

    def say(self, row: dict[str, Any]) -> None:
        row["at_s"] = round(time.monotonic() - self.begin, 1)
        self.rows.append(row)
        Path(self.options.json).write_text(
            json.dumps({"machine": vars(machine()) if torch.cuda.is_available() else None, "rows": self.rows}, indent=1)
        )
        print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)

    def guarded(self, row: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
        if self.left() < 0:
            return
        try:
            row |= work()
        except Exception as error:
            row |= {"failed": f"{type(error).__name__}: {error}"[:400], "trace": traceback.format_exc()[-900:]}
        self.say(row)

    @torch.no_grad()
    def build(self) -> None:
        from peft import LoraConfig, get_peft_model

        model = build_4bit(self.config, self.device).eval()
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEARS))  # type: ignore[call-arg]
        self.peft: Any = get_peft_model(model, config).eval()
        torch.manual_seed(1)
        for name, parameter in self.peft.named_parameters():
            if "lora_" in name:
                scale = parameter.shape[1] ** -0.5 if "lora_A" in name else 0.02
                values = torch.randn_like(parameter, dtype=torch.float32) * scale
                parameter.data = values.to(getattr(torch, self.options.adapter))
            parameter.requires_grad_(False)
        self.model = self.peft.base_model.model.model
        self.say({"row": "built", "layers": self.options.layers, "device": self.name(), "torch": torch.__version__})

    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"

    @torch.no_grad()
    def dense(self, dtype: torch.dtype, adapter: bool) -> Any:
        """Return the layers with dense weights; those of the adapter are merged. fp32 weights are code * scale unrounded."""
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model: Any = LlamaForCausalLM(self.config).to(dtype).model
        model = model.to_empty(device=self.device).to(dtype).eval()
        reference = self.model
        model.rotary_emb = type(reference.rotary_emb)(self.config).to(self.device)
        for target, source in zip(model.layers, reference.layers, strict=True):
            for part in ("self_attn", "mlp"):
                for name in LINEARS:
                    layer = getattr(getattr(source, part), name, None)
                    if layer is None:
                        continue
                    base = layer.base_layer.weight
                    weight = exact(weight_of(base.data, base.quant_state)).float()
                    if adapter:
                        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                        weight += layer.scaling["default"] * (b.float() @ a.float())
                    getattr(getattr(target, part), name).weight.data = weight.to(dtype)
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(target, name).weight.data = getattr(source, name).weight.data.to(dtype)
        model.norm.weight.data = reference.norm.weight.data.to(dtype)
        return model

    @contextlib.contextmanager
    def side(self, name: str, batch: int) -> Iterator[None]:
        """The context of one side: which patch, and with the adapter or without."""
        with contextlib.ExitStack() as stack:
            kind = name.split()[0]
            stack.enter_context(patch(kind != "bnb", **({"matmul": "auto"} if kind == "auto" else {})))
            if "plain" in name:
                stack.enter_context(self.peft.disable_adapter())
            yield

    @torch.no_grad()
    def truth(self) -> None:
        """Compute each batch's hidden states in fp32, with and without the adapter."""
        torch.backends.cuda.matmul.allow_tf32 = False
        for adapter in (True, False):
            model = self.dense(torch.float32, adapter)
            for batch in self.options.batches:
                self.truths[batch, adapter] = Step(model, self.config, batch, torch.float32, self.device)()
            del model
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def measure(self, step: Step, batch: int, adapter: bool, full: bool) -> dict[str, Any]:
        truth, found = self.truths[batch, adapter], step()
        result: dict[str, Any] = {"error": float((found.float() - truth).norm() / truth.norm())}
        if self.device != "cuda":
            return result
        for _ in range(2):
            step()
        graph = capture(step)
        again = float((step() - found).abs().max())
        graph.replay()
        ms = median_ms(graph.replay, 10)
        result |= {"graph_ms": round(ms, 4), "tokens_s": round(batch / ms * 1e3, 1), "differs_between_runs": again}
        if full:
            result["eager_ms"] = round(median_ms(step, 3, 3), 3)
        if batch in (8, 32):
            graph.replay()
            result["profile"] = by_kernel(graph.replay)
        del graph
        return result

    def one(self, name: str, batch: int, full: bool = True) -> None:
        adapter = "plain" not in name

        def work() -> dict[str, Any]:
            if name.startswith("dense"):
                return self.measure(
                    Step(self.merged[adapter], self.config, batch, torch.bfloat16, self.device), batch, adapter, full
                )
            with torch.no_grad(), self.side(name, batch):
                return self.measure(
                    Step(self.model, self.config, batch, torch.bfloat16, self.device), batch, adapter, full
                )

        self.guarded({"row": "step", "side": name, "batch": batch}, work)

    def compiled(self, name: str, batch: int) -> None:
        """A step of the compiled model, captured in a CUDA graph."""

        @torch.no_grad()
        def work() -> dict[str, Any]:
            torch._dynamo.reset()
            model = self.merged[True] if name.startswith("dense") else self.model
            context = contextlib.nullcontext() if name.startswith("dense") else self.side(name, batch)
            with context:
                eager = Step(model, self.config, batch, torch.bfloat16, self.device)
                eager.model = torch.compile(model, dynamic=False)
                begin = time.monotonic()
                eager()
                seconds = time.monotonic() - begin
                return {"compile_s": round(seconds, 1), **self.measure(eager, batch, "plain" not in name, False)}

        self.guarded({"row": "compiled", "side": name, "batch": batch}, work)

    def generate(self, name: str, batch: int) -> None:
        """Greedy ``generate`` with a static cache, which transformers compiles: tokens/s of the second call."""

        @torch.no_grad()
        def work() -> dict[str, Any]:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            prompt = torch.randint(0, 512, (batch, 16), generator=torch.Generator().manual_seed(0)).to(self.device)
            options: dict[str, Any] = {"cache_implementation": "static", "do_sample": False, "min_new_tokens": TOKENS}
            found: list[dict[str, Any]] = []
            with self.side(name, batch):
                for _ in range(2):
                    begin = time.monotonic()
                    tokens = self.peft.generate(
                        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, **options
                    )
                    tokens = tokens[:, 16:].tolist()
                    seconds = time.monotonic() - begin
                    stats = torch._dynamo.utils.counters
                    found.append(
                        {
                            "s": round(seconds, 2),
                            "tokens_s": round(batch * TOKENS / seconds, 1),
                            "compilations": stats["stats"]["unique_graphs"],
                            "graph_breaks": sum(stats["graph_break"].values()),
                        }
                    )
            self.tokens[name, batch] = tokens
            reference = self.tokens.get(("bnb", batch), tokens)
            same = [
                next((i for i in range(TOKENS) if x[i] != y[i]), TOKENS) for x, y in zip(tokens, reference, strict=True)
            ]
            return {"first": found[0], "second": found[1], "tokens_like_bnb": same}

        self.guarded({"row": "generate", "side": name, "batch": batch}, work)

    @torch.no_grad()
    def kernels(self) -> None:
        """The fused matmul with the adapter beside the one without, in microseconds."""
        from nf4_patch.tools.timing import gpu_times

        for batch in self.options.batches:
            for name in ("q_proj", "k_proj", "gate_proj", "down_proj"):

                def work(name: str = name, batch: int = batch) -> dict[str, Any]:
                    part = "self_attn" if name[0] in "qk" else "mlp"
                    layers = [getattr(getattr(layer, part), name) for layer in self.model.layers]
                    k, n = layers[0].in_features, layers[0].out_features
                    x = torch.randn(batch, k, device=self.device).bfloat16()
                    calls: dict[str, list[Any]] = {"base": [], "with adapter": []}
                    for layer in layers:
                        base, a = layer.base_layer, layer.lora_A["default"].weight
                        b = layer.lora_B["default"].weight
                        weight = weight_of(base.weight.data, base.weight.quant_state)
                        config: Any = config_for(x.get_device(), batch, n, k)
                        launch = launches.resolve(x, weight, None, config, a)
                        calls["base"].append(lambda base=base: base(x))
                        calls["with adapter"].append(lambda launch=launch, a=a, b=b: launch.add(x, a, b, 1.0))
                    want = x.double() @ exact(weight).t() + (x.double() @ a.double().t()) @ b.double().t()
                    worst = float((launch.add(x, a, b, 1.0).double() - want).norm() / want.norm())
                    with patch(True, matmul="auto"):
                        times = gpu_times({key: each * 3 for key, each in calls.items()}, rounds=6)
                    us = {key: round(each.median, 2) for key, each in times.items()}
                    return {"shape": f"{n}x{k}", "error": worst, "us": us}

                self.guarded({"row": "kernels", "layer": name, "batch": batch}, work)

    def run(self) -> None:
        self.guarded({"row": "build"}, lambda: self.build() or {})
        self.guarded({"row": "truth"}, lambda: self.truth() or {})
        self.merged: dict[bool, Any] = {}

        def merge() -> dict[str, Any]:
            self.merged = {True: self.dense(torch.bfloat16, True)}
            return {}

        self.guarded({"row": "merge"}, merge)
        first = [batch for batch in (8, 32) if batch in self.options.batches]
        order = first + [batch for batch in self.options.batches if batch not in first]
        sides = ["bnb", "auto", "auto plain", "dense", "enable", "bnb plain", "enable plain"]
        if "steps" in self.options.what:
            for batch in order:
                for side in sides:
                    self.one(side, batch)
        if self.device == "cuda" and "compiled" in self.options.what:
            for batch in self.options.compiled:
                for side in ("auto", "bnb", "auto plain", "dense"):
                    if self.left() > 30:
                        self.compiled(side, batch)
        if "generate" in self.options.what:
            for batch in self.options.compiled:
                for side in ("bnb", "auto"):
                    if self.left() > 30:
                        self.generate(side, batch)
        if self.device == "cuda" and "kernels" in self.options.what:
            self.kernels()
        self.summary()

    def summary(self) -> None:
        """Print the ratios of issue 64, relative to bitsandbytes + peft and to the step without an adapter."""
        found = {(row["side"], row["batch"]): row for row in self.rows if row["row"] == "step" and "graph_ms" in row}
        for (side, batch), row in found.items():
            ratios = {}
            for other in ("bnb", "auto plain", "dense"):
                base = found.get((other, batch))
                if base:
                    ratios[f"times as fast as {other}"] = round(base["graph_ms"] / row["graph_ms"], 3)
            print(f"{batch:3} {side:16} {row['graph_ms']:8.3f} ms  error {row['error']:.5f}  {ratios}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--compiled", type=int, nargs="*", default=[8, 32], help="batches to compile, last")
    parser.add_argument("--what", nargs="+", default=["steps", "compiled", "generate", "kernels"])
    parser.add_argument("--adapter", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of A and B")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--json", default="generation_lora.json")
    parser.add_argument("--tiny", action="store_true", help="small layers, for a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    Bench(arguments()).run()
