"""python -m benchmarks.offload [NAME ...] [--json FILE]: train a model on a GPU that is too small for it, with enable(offload=...).

Models have real shapes, all layers and random weights. The values of a 4-bit checkpoint are generated when transformers
reads them. LoRA is on the attention and the experts or, for a dense model with lora="fused", on all linear layers.
Adapters are in bf16 as in TRL, with autocast and gradient checkpointing.

Each side runs in a separate process with a cap on PyTorch's allocator. Its result is added to FILE as soon as it is
done. Without NAME and --model, all of RUNS are run. With --turns, and for the runs in TURNS, all sides run in one
process and alternate step by step, so that other load on the machine affects all sides alike. Peak memory is measured
in separate processes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import nf4_patch
from benchmarks import models
from benchmarks.timing import kernels, machine, synchronize
from benchmarks.training import trained
from nf4_patch.libraries.bitsandbytes.stacks import packed_chains
from nf4_patch.offload import host_memory

GIB = 2**30
METHOD = (
    "Steps of whole models with random weights: adapters in bf16, autocast, checkpointing. Each run has a process, but runs with"
    " in_turns share one and alternate step by step. If a host has several GPUs, each may run one process at the same time. cap:"
    " GiB that PyTorch may allocate, or 0 for all of gpu_bytes. Memory is in bytes. gpu_ms, wall_ms: medians of all steps."
    " kernels_ms, copies_ms: sums of one step. fetches: copies of layers in one step. late: number of fetches that began only when"
    " the layer was read. experts: bytes of all packed experts; rows without it offloaded only those. fetched: bytes of all fetches. bus: bytes per second of a plain copy from pinned memory. losses,"
    " gradients, adapters: of steps with deterministic algorithms."
)
SIDES = ("resident", "again", "budget", "all")  # "again" repeats "resident", to show the noise
WARM_UPS = 2
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
HEAD_ROWS = 256  # rows of fp32 logits at a time


def gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, hidden_size=2880,
        intermediate_size=2880, head_dim=64, num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip


def glm() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(  # type: ignore[call-arg]  # of its attention
        num_hidden_layers=46, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_attention_heads=96,
        num_key_value_heads=8, head_dim=128, attention_bias=True, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=1, vocab_size=151552, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def gemma() -> Any:
    """Return the config of Gemma 4's text layers."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        num_hidden_layers=30, hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704, num_attention_heads=16,
        num_key_value_heads=8, num_global_key_value_heads=2, head_dim=256, global_head_dim=512, attention_k_eq_v=True,
        num_experts=128, top_k_experts=8, enable_moe_block=True, hidden_size_per_layer_input=0, sliding_window=1024,
        vocab_size=262144, dtype="bfloat16",
    )  # type: ignore[call-arg]  # fmt: skip


def qwen3_32b() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(  # type: ignore[call-arg]
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=8192, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def llama(shape: models.Shape) -> Any:
    return models.config_of(shape, torch.bfloat16)


def tiny() -> Any:
    """Return a tiny config for tests."""
    config = models.qwen3(2, 512)
    config.update({
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    })  # fmt: skip
    return config


MODELS: dict[str, Callable[[], Any]] = {
    "Qwen3-30B-A3B": functools.partial(models.qwen3, 48, 151936), "gpt-oss-20b": gpt_oss, "Gemma-4-26B-A4B": gemma,
    "GLM-4.5-Air": glm, "tiny": tiny, "Llama-3.1-8B": functools.partial(llama, models.LLAMA_8B),
    "Qwen3-32B": qwen3_32b, "Llama-3.1-70B": functools.partial(llama, models.MODELS["llama-70b"]),
    "tiny dense": functools.partial(llama, models.Shape(64, 128, 4, 4, 2)),
}  # fmt: skip
DENSE = ("Llama-3.1-8B", "Qwen3-32B", "Llama-3.1-70B", "tiny dense")


@dataclass(frozen=True)
class Setting:
    """Settings of a training run."""

    model: str = "Qwen3-30B-A3B"
    layers: int = 0  # 0 for all layers
    tokens: int = 2048
    cap: float = 0.0  # GiB of PyTorch's allocator, 0 for no cap
    budget: str = ""  # value of offload= for the side "budget"
    rank: int = 16
    optimizer: str = "adamw8bit"  # bitsandbytes' 8-bit AdamW, or "adamw" for PyTorch's
    attention_only: bool = False
    bits: int = 10  # steps that are compared bit for bit, with PyTorch's deterministic algorithms
    steps: int = 10  # timed steps


# Caps are the GPU's memory minus 0.5 GB, which a process uses outside PyTorch's allocator. 8 GiB is an additional target.
CAP_8, CAP_12, CAP_16, CAP_24 = 7.0, 10.7, 14.4, 21.9
TIMED = ("resident", "budget", "all")
RUNS: dict[str, tuple[Setting, tuple[str, ...]]] = {
    "bits": (Setting(budget="8GiB", steps=0), SIDES),
    "8 GiB": (Setting(cap=8), ("all",)),
    "bits, r = 8": (Setting(rank=8, steps=0), ("resident",)),
    "8 GiB, r = 8": (Setting(cap=8, rank=8), ("all",)),
    "12 GB": (Setting(cap=CAP_12, budget="3GiB", bits=0), ("budget",)),
    "16 GB": (Setting(cap=CAP_16, budget="6GiB", bits=0), ("budget",)),
    "24 GB": (Setting(cap=CAP_24, bits=0), ("resident",)),
    "4,096 tokens": (Setting(budget="8GiB", tokens=4096, bits=0, steps=14), TIMED),
    "gpt-oss": (Setting("gpt-oss-20b", cap=8, bits=0, steps=7), ("all",)),
    "Gemma": (Setting("Gemma-4-26B-A4B", cap=CAP_16, bits=0), ("all",)),
    "GLM": (Setting("GLM-4.5-Air", cap=CAP_24, bits=0, steps=7), ("all",)),
    "8B": (Setting("Llama-3.1-8B", cap=CAP_8, bits=0), ("all",)),
    "32B": (Setting("Qwen3-32B", cap=CAP_12, bits=0, steps=7), ("all",)),
    "32B, resident": (Setting("Qwen3-32B", bits=0, steps=7), ("resident", "all")),
    "70B": (Setting("Llama-3.1-70B", cap=CAP_24, tokens=4096, bits=0, steps=5), ("all",)),
    "70B, resident": (Setting("Llama-3.1-70B", 16, 4096, bits=0, steps=5), ("resident", "all")),
}

# Runs whose sides alternate in one process (True). All others run in separate processes (False), which measure peaks too.
TURNS = {"4,096 tokens": (False, True), "32B, resident": (True,), "70B, resident": (True,)}


# --- a generated 4-bit checkpoint ---


@dataclass(frozen=True)
class Made:
    """Stand-in for a slice of a safetensors file. The tensor is generated when it is read."""

    kind: str  # the dtype as safetensors spells it
    make: Callable[[], Tensor]

    def __getitem__(self, _everything: Any) -> Tensor:
        return self.make()

    def get_dtype(self) -> str:
        return self.kind


def numbers(name: str, device: Any) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def random_bytes(name: str, size: tuple[int, ...], device: Any) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device).random_(generator=numbers(name, device))


def plain(name: str, like: Tensor, device: Any) -> Tensor:
    """Return normal random numbers for a matrix, zeros for a bias, and ones for other vectors (norms and scales)."""
    value = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.dim() > 1 and not name.endswith("bias"):
        return value.normal_(std=0.02, generator=numbers(name, device))
    return value.fill_(float(not name.endswith(("bias", "sinks"))))


@functools.cache
def state_of_normal_numbers(device: Any) -> Any:
    from bitsandbytes.functional import quantize_4bit

    sample = torch.empty(2**20, device=device).normal_(std=0.02, generator=numbers("", device)).to(torch.bfloat16)
    return quantize_4bit(sample, compress_statistics=True, quant_type="nf4")[1]


def packed_entries(name: str, like: Tensor, device: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries that bitsandbytes saves for an NF4 weight: random bytes, with the scales of normal numbers."""
    blocks, state = -(-like.numel() // 64), copy.copy(state_of_normal_numbers(device))
    scales = {"absmax": (state.absmax, blocks), "nested_absmax": (state.state2.absmax, -(-blocks // 256))}
    state.shape = like.shape
    yield name, Made("U8", functools.partial(random_bytes, name, (-(-like.numel() // 2), 1), device))
    for field, value in state.as_dict(packed=True).items():
        if field in scales:
            value = Made("U8" if field == "absmax" else "F32", functools.partial(repeated, *scales[field]))
        yield f"{name}.{field}", value


def repeated(values: Tensor, count: int) -> Tensor:
    return values.repeat(-(-count // len(values)))[:count].clone()


def written(empty: Any, device: Any) -> dict[str, Any]:
    """Return a checkpoint for a model on the meta device. Linear layers except the head, and expert stacks, are packed."""
    linear = {f"{name}.weight" for name, m in empty.named_modules() if type(m) is torch.nn.Linear and name != "lm_head"}
    entries: dict[str, Any] = {}
    for name, like in empty.state_dict().items():
        if name == "lm_head.weight" and empty.config.tie_word_embeddings:
            continue
        if name in linear or (like.dim() == 3 and not name.endswith("bias")):
            entries |= packed_entries(name, like, device)
        else:
            kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[like.dtype]
            entries[name] = Made(kind, functools.partial(plain, name, like, device))
    return entries


def config_of(setting: Setting) -> Any:
    config = MODELS[setting.model]()
    if setting.layers:
        config.num_hidden_layers = setting.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: setting.layers]
    config.use_cache = False
    return config


def load(config: Any, device: Any) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=["lm_head"],
    ).to_dict()  # fmt: skip
    state = written(empty, device)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": device}, "output_loading_info": True}
    model, found = type(empty).from_pretrained(None, config=config, state_dict=state, **options)
    if wrong := [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in found[kind]]:
        raise RuntimeError(f"the generated checkpoint does not match the model: {wrong}")
    return model


# --- training ---


def lora_options(setting: Setting) -> dict[str, Any]:
    dense = setting.model in DENSE
    experts = [] if setting.attention_only or dense else models.EXPERTS
    linear = list(models.LINEARS if dense and not setting.attention_only else models.LINEARS[:4])
    targets = {"target_modules": linear, "target_parameters": experts, "task_type": "CAUSAL_LM"}
    return {"r": setting.rank, "lora_alpha": setting.rank, "init_lora_weights": False, **targets}


def with_lora(model: Any, setting: Setting) -> Any:
    from peft import LoraConfig, get_peft_model

    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    with mock.patch.object(torch.nn.Linear, "reset_parameters"):  # random numbers on the CPU are slow
        model = get_peft_model(model, LoraConfig(**lora_options(setting))).train()
    for number, parameter in enumerate(trained(model)):
        # bf16 as in TRL. Random, because peft initializes B to zero, so adapters would not affect the loss.
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.data.normal_(std=0.01, generator=numbers(str(number), parameter.device))
    return model


def optimizer_of(name: str, parameters: list[torch.nn.Parameter]) -> Any:
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}
    if name == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **options)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **options)


def head_loss(head: Any, hidden: Tensor, wanted: Tensor) -> Tensor:
    return cross_entropy(head(hidden).float(), wanted, reduction="sum")


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return the next-token loss. Logits are computed for HEAD_ROWS rows at a time, like Liger's and Unsloth's losses.

    The fp32 logits of all rows would take more memory than the layers.
    """
    causal = model.get_base_model()
    hidden = causal.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    wanted = ids[:, 1:].flatten()
    parts = zip(hidden.split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True)
    losses = [checkpoint(head_loss, causal.lm_head, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / len(wanted)


class Training:
    """Training of one model, step by step."""

    def __init__(self, model: Any, setting: Setting):
        self.model, self.tokens, self.parameters = model, setting.tokens, trained(model)
        self.optimizer = optimizer_of(setting.optimizer, self.parameters)
        self.device, self.count = self.parameters[0].device, 0
        self.vocabulary = model.get_base_model().config.vocab_size

    def step(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.count)
        self.count += 1
        ids = torch.randint(self.vocabulary, (1, self.tokens), generator=generator).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = loss_of(self.model, ids)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def compared(self, steps: int) -> dict[str, Any]:
        """Run steps with PyTorch's deterministic algorithms. Otherwise, attention's backward would add in any order.

        Return the losses, the sum of the bits of every gradient per step, and digests of the last gradients and
        adapters.
        """
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention has a deterministic backward in every release
        losses, sums = [], []
        for _ in range(steps):
            losses.append(self.step().item())
            sums.append(torch.stack([bit_sum(parameter.grad) for parameter in self.parameters]).tolist())
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.use_deterministic_algorithms(False)
        gradients = digest([parameter.grad for parameter in self.parameters])
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        trace = {"names": names, "sums": sums}
        return {"losses": losses, "gradients": gradients, "adapters": digest(self.parameters), "trace": trace}

    def timed_step(self) -> tuple[float, float]:
        """Return the milliseconds of a step on the GPU, between two events, and in wall-clock time."""
        gc.collect()
        synchronize()
        begin = time.perf_counter()
        if self.device.type != "cuda":
            self.step()
            return 0.0, (time.perf_counter() - begin) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        self.step()
        last.record()
        synchronize()
        return first.elapsed_time(last), (time.perf_counter() - begin) * 1e3


def timed(trainings: list[Training], steps: int) -> list[dict[str, Any]]:
    """Time the trainings, alternating step by step. Fetches are counted in the last warm-up step."""
    results, found = [], []
    for training in trainings:
        for _ in range(WARM_UPS):
            training.step()
        before = fetches()
        training.step()
        found.append([now - then for now, then in zip(fetches(), before, strict=True)])
    gc.disable()  # a collection takes as long as several layers
    rounds = [[training.timed_step() for training in trainings] for _ in range(steps)]
    gc.enable()
    for training, (count, late), times in zip(trainings, found, zip(*rounds, strict=True), strict=True):
        gpu, wall = zip(*times, strict=True)
        busy = kernels(training.step) if training.device.type == "cuda" else []
        copies = [ms for name, ms in busy if "HtoD" in name]
        results.append({
            "gpu_ms": statistics.median(gpu), "wall_ms": statistics.median(wall), "every_gpu_ms": gpu, "every_wall_ms": wall,
            "kernels_ms": sum(ms for _, ms in busy) - sum(copies), "copies_ms": sum(copies),
            "fetches": count, "late": late, "fetched": count * largest_block(), "in_turns": len(trainings) > 1,
        })  # fmt: skip
    return results


def bit_sum(tensor: Any) -> Tensor:
    whole: Tensor = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).sum(dtype=torch.int64)
    return whole


def digest(tensors: list[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    return found.hexdigest()


def fetches() -> tuple[int, int]:
    """Return the number of fetches so far, and how many of them were late."""
    found = nf4_patch.status().offload.values()
    return sum(each.fetches for each in found), sum(each.late for each in found)


def packed_experts(model: Any) -> int:
    """Return the bytes of the packed stacks of experts, wherever they are."""
    chains = [
        (chain.original, chain[0].quant_state) for module in model.modules() for chain in packed_chains(module).values()
    ]
    return sum(
        packed.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        for packed, state in chains
    )


def largest_block() -> int:
    """Return the bytes that a fetch copies: the packed weights of a layer."""
    return max((sum(block.sizes.values()) for block in host_memory.living()), default=0)


# --- a side, in a separate process ---


def hardware() -> dict[str, float]:
    """Return the speed of a copy from pinned host memory, in bytes per second, and the size of GPU memory in bytes."""
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    place = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(6):
        synchronize()
        begin = time.perf_counter()
        place.copy_(host, non_blocking=True)
        synchronize()
        times.append(time.perf_counter() - begin)
    return {"bus": host.nbytes / statistics.median(times), "gpu_bytes": torch.cuda.mem_get_info()[1]}


def peak() -> dict[str, int]:
    """Return the peak memory in bytes since the last call."""
    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0}
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    torch.cuda.reset_peak_memory_stats()
    return found


def enable(setting: Setting, side: str) -> None:
    dense: dict[str, Any] = {"lora": "fused"} if setting.model in DENSE else {"experts": "4bit"}
    nf4_patch.enable(offload=offload_of(setting, side), **dense)


def offload_of(setting: Setting, side: str) -> str:
    return {"resident": "off", "again": "off", "budget": setting.budget, "all": "all"}[side]


def measured_in_turns(setting: Setting, sides: list[str], device: Any) -> list[dict[str, Any]]:
    trainings, found = [], hardware() if torch.cuda.is_available() else {}
    for side in sides:
        enable(setting, side)
        trainings.append(Training(with_lora(load(config_of(setting), device), setting), setting))
    return [
        {**dataclasses.asdict(setting), "side": side, "failed": "", **found, **times}
        for side, times in zip(sides, timed(trainings, setting.steps), strict=True)
    ]


def measured(setting: Setting, side: str, device: Any) -> dict[str, Any]:
    """Run one side. If it runs out of memory, return its results up to then."""
    offload = offload_of(setting, side)
    result: dict[str, Any] = {**dataclasses.asdict(setting), "side": side, "offload": offload}
    cuda = torch.cuda.is_available()
    if cuda:
        result |= hardware() | {"allocator": os.environ.get(ALLOCATOR, "")}
        torch.cuda.empty_cache()
        peak()
    if cuda and setting.cap:
        torch.cuda.set_per_process_memory_fraction(setting.cap * GIB / torch.cuda.mem_get_info()[1])
    enable(setting, side)
    try:
        result["failed"] = "loading"
        begin = time.perf_counter()
        model = load(config_of(setting), device)
        synchronize()
        result |= {"load_s": time.perf_counter() - begin, "peak_loading": peak()}
        result |= {"loaded": torch.cuda.memory_allocated() if cuda else 0}
        result |= {"in_host": sum(each.in_host for each in nf4_patch.status().offload.values())}
        result |= {"experts": packed_experts(model)}
        result["failed"] = "adapters"
        model = with_lora(model, setting)
        result |= {"peak_adapters": peak(), "adapters_held": sum(each.nbytes for each in trained(model))}
        training = Training(model, setting)
        result["failed"] = "compared steps"
        if setting.bits:
            result |= training.compared(setting.bits)
            result["peak_compared"] = peak()
        result["failed"] = "timed steps"
        if setting.steps:
            result |= timed([training], setting.steps)[0] | {"peak": peak()}
        result["failed"] = ""
    except torch.OutOfMemoryError as error:
        result["error"] = str(error)[:400]
    return result


def in_process(setting: Setting, sides: list[str]) -> list[dict[str, Any]]:
    given = json.dumps(dataclasses.asdict(setting))
    command = [sys.executable, "-m", "benchmarks.offload", "--worker", ",".join(sides), given]
    environment = dict(os.environ) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # required by deterministic algorithms
    if setting.cap:
        environment.setdefault(ALLOCATOR, "expandable_segments:True")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines or [
        {**dataclasses.asdict(setting), "side": side, "failed": f"exit {done.returncode}"} for side in sides
    ]


def key(run: dict[str, Any], *without: str) -> tuple[Any, ...]:
    fields = [field.name for field in dataclasses.fields(Setting) if field.name not in (*without, "bits", "steps")]
    return tuple(run[field] for field in fields)


def said(run: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Return a line about a run. Runs of the same training have to be bit-identical, whatever their cap and budget are."""
    where = f"{run['model']}, {run['tokens']} tokens, r = {run['rank']}, cap {run['cap']:g} GiB, {run['side']}"
    if run["failed"]:
        return f"{where}: failed ({run['failed']}) {run.get('error', '')}"
    words = [
        f"step {run.get('gpu_ms', 0):.0f} ms GPU (fastest {min(run.get('every_gpu_ms', [0])):.0f}), {run.get('wall_ms', 0):.0f} "
        f"ms wall, kernels {run.get('kernels_ms', 0):.0f} ms, copies {run.get('copies_ms', 0):.0f} ms",
        f"{run.get('fetches', 0):g} fetches, {run.get('late', 0):g} of them late, {run.get('fetched', 0) / 1e9:.2f} GB per step",
    ]
    if "load_s" in run:
        words += [
            f"bus {run.get('bus', 0) / 1e9:.1f} GB/s, loaded in {run['load_s']:.0f} s, peaks GiB: loading "
            f"{run['peak_loading']['reserved'] / GIB:.2f}, adapters {run['peak_adapters']['reserved'] / GIB:.2f}, steps "
            f"{run.get('peak', {}).get('allocated', 0) / GIB:.2f} ({run.get('peak', {}).get('reserved', 0) / GIB:.2f} reserved)",
            f"host {run['in_host'] / GIB:.2f} GiB",
        ]
    fields = ("losses", "gradients", "adapters")
    for other in others:
        alike = key(other, "cap", "budget") == key(run, "cap", "budget") and other["bits"] == run["bits"] > 0
        if alike and other["side"] != run["side"] and "adapters" in other:
            same = [field for field in fields if other[field] == run[field]]
            words.append(f"bit-identical to {other['side']}: {', '.join(same) or 'nothing'}")
    return f"{where}: " + "; ".join(words)


def first_difference(run: dict[str, Any], other: dict[str, Any]) -> str:
    """Return where two traces first differ. The list shows the last layers, because the backward runs these first."""
    for step, sums in enumerate(zip(run["sums"], other["sums"], strict=True), 1):
        found = [name for name, ours, theirs in zip(run["names"], *sums, strict=True) if ours != theirs]
        if found:
            return f"from step {step} onwards, {len(found)} of {len(run['names'])} gradients: {', '.join(found[-6:])}"
    return "nowhere"


def write(file: Path | None, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a run to the file, and return the other runs in it.

    Times with --turns are merged with the peaks of a run without --turns.
    """
    before = json.loads(file.read_text()) if file and file.exists() else {"rows": []}
    others = [each for each in before["rows"] if (key(each), each["side"]) != (key(run), run["side"])]
    for same in (each for each in before["rows"] if run.get("in_turns") and each not in others):
        run |= same | run
    taken = run.pop("machine", before.get("machine"))
    if file:
        file.write_text(json.dumps({"machine": taken, "rows": [*others, run], "method": METHOD}, indent=1) + "\n")
    return others


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"runs to measure: {', '.join(map(repr, RUNS))}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, help="sides to measure; default: the sides in RUNS, or TIMED"
    )
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    for field in dataclasses.fields(Setting):
        kind: dict[str, Any] = {"action": "store_true"} if field.type == "bool" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=None, **kind)
    args = parser.parse_args(arguments)
    if args.worker:
        sides, setting = args.worker[0].split(","), Setting(**json.loads(args.worker[1]))
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        turns = len(sides) > 1
        for run in measured_in_turns(setting, sides, device) if turns else [measured(setting, sides[0], device)]:
            if torch.cuda.is_available():
                run["machine"] = vars(machine())
            print(json.dumps(run))
        return
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Setting) if getattr(args, f.name) is not None}
    for name in args.names or ([""] if args.model else RUNS):
        setting, sides = RUNS.get(name, (Setting(), TIMED))
        setting, first = dataclasses.replace(setting, **given), None
        wanted = [side for side in args.sides or sides if side != "budget" or setting.budget]
        ways = (True,) if args.turns else TURNS.get(name, (False,))
        alone = [[side] for side in wanted]
        for in_turns, processes in [(turns, each) for turns in ways for each in ([wanted] if turns else alone)]:
            is_timed = in_turns or True not in ways  # otherwise only peaks are measured
            for run in in_process(setting if is_timed else dataclasses.replace(setting, steps=1), processes):
                trace = run.pop("trace", None)
                print(said(run, write(args.json, run)), flush=True)
                if trace and first:
                    print(f"  gradients differ from the first side's: {first_difference(trace, first)}", flush=True)
                first = first or trace


if __name__ == "__main__":
    main()
