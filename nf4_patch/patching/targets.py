"""What is replaced: one row a target."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .switch import switch

# A release's parameter names; a function with others is left alone, by name.
Parameters = tuple[str, ...]
ANY: tuple[Parameters, ...] = ()  # of a function that is written in C, whose parameters cannot be read


@dataclass(frozen=True)
class OwnKernel:
    """A fused kernel of the library's own. Code that is compiled keeps it everywhere: Inductor launches it without the
    dispatcher that our op goes through."""

    used: str  # the global of the row's module that says whether the library uses it
    releases: str
    slower_on: tuple[tuple[int, int], ...]  # capabilities where it was measured to be slower than eager calls of ours
    advice: str

    def in_use(self, module: str) -> bool:
        return bool(getattr(sys.modules.get(module), self.used, False))

    def keeps_eager_calls(self) -> bool:
        """Whether it was not measured to be slower on every GPU here."""
        return not _slower_everywhere(self.slower_on)


@functools.cache
def _slower_everywhere(slower_on: tuple[tuple[int, int], ...]) -> bool:
    import torch

    from ..nf4.runtime import capability_of

    capabilities = map(capability_of, range(torch.cuda.device_count()))
    return all(capability in slower_on for capability in capabilities)


@dataclass(frozen=True)
class Target:
    """One function of one module."""

    function: str  # "module:attribute", dotted for a static method of a class, or an entry of a dict of one
    releases: str  # which have it, ">= 1.0" or "<= 1.0"; "": all
    tested: tuple[str, ...]  # releases that the tests ran with
    parameters: tuple[Parameters, ...]  # the signatures that the replacement adapts
    replace: str  # "module:function", of this package ".module:function": makes the replacement of (row, original)
    covers: str
    unless: str = ""  # an attribute of the module that makes this row void
    only: str = ""  # an option: in place only where that is switched on
    lazy: bool = False  # its package imports the module only when it is used
    after: str = ""  # installed when this module is imported, and not with its own
    uncounted: str = ""  # what ``status()`` says of a row whose calls are neither hits nor fallbacks
    stays: bool = (
        False  # in place whatever is switched off: it does nothing but to what an option has made, which may live on
    )
    copied: bool = False  # other modules hold it by value: sweep them when the module was imported first
    own_kernel: OwnKernel | None = None  # the library's, which keeps calls that ours was not measured to run faster

    @functools.cached_property
    def name(self) -> str:
        return self.function.replace(":", ".")

    @functools.cached_property
    def module(self) -> str:
        return self.function.partition(":")[0]

    @functools.cached_property
    def library(self) -> str:
        """The package, and the name of its distribution."""
        return self.module.partition(".")[0]

    @property
    def trigger(self) -> str:
        """The module whose import installs the row."""
        return self.after or self.module

    def holder(self, module: Any) -> tuple[Any, str]:
        """The module, class or dict that holds the function (None if there is none), and its name there."""
        *classes, name = self.function.partition(":")[2].split(".")
        for each in classes:
            module = getattr(module, each, None)
        return module, name

    def make(self, original: Callable[..., Any]) -> Any:
        """The replacement, marked as ours: see placement.is_ours."""
        module, function = self.replace.split(":")
        replacement: Any = getattr(importlib.import_module(module, __package__), function)(self, original)
        replacement.__nf4_patch__ = replacement, switch  # itself: functools.wraps copies attributes to a wrapper
        return replacement


EXPERTS = (("self", "hidden_states", "top_k_index", "top_k_weights"),)
FAST_GEMV = (("X", "W", "quant_state", "out"),)
MATMUL_LORA = ("X", "W", "W_quant", "A", "B", "s", "out")
FAST_DEQUANTIZE = ("W", "quant_state", "out", "use_global_buffer")
SECOND_LEVEL = ("absmax_8bit", "absmax_code", "absmax_offset")
LINEAR_4BIT = (("A", "B", "shapeB", "absmax", "blocksize", "quant_type", "bias", *SECOND_LEVEL),)
INJECT = ("self", "model", "adapter_name", "autocast_adapter_dtype", "low_cpu_mem_usage", "state_dict")
HF_QUANTIZER = ("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file")
# Releases that scripts/release_matrix.py ran; docs/data/releases.json says on which machine.
TESTED_OP = ("0.50.2",)
TESTED_AUTOGRAD = ("0.49.2", "0.50.2")
TESTED_BITSANDBYTES = ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.2")
TESTED_UNSLOTH = ("2026.9.7", "2026.10.9")
TESTED_LOADING = ("5.17.0", "5.23.0", "5.24.0")
TESTED_TRANSFORMERS = ("5.0.0", *TESTED_LOADING)
TESTED_TORCH = ("2.11.0", "2.13.0")

QUANTIZER = "quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer"
EXPERTS_INTERFACE = "transformers.integrations.moe:ExpertsInterface._global_mapping"

MatmulTarget = functools.partial(Target, only="matmul")
CacheTarget = functools.partial(Target, only="cache", uncounted="its reads may come from the cache")
PeftTarget = functools.partial(Target, only="experts", uncounted="the experts' forward counts")
LoadingTarget = functools.partial(Target, lazy=True, uncounted="it loads and saves models")

# In the order of the fields: function, releases, tested, parameters, replace, covers.
TARGETS: list[Target] = [
    Target(
        "bitsandbytes.functional:dequantize_4bit", ">= 0.43", TESTED_BITSANDBYTES,
        (("A", "quant_state", "absmax", "out", "blocksize", "quant_type"),), ".adapters.bitsandbytes:dequantize_4bit",
        "backward of every Linear4bit, forward before 0.50; peft merge and DoRA; model.dequantize()",
        copied=True,
    ),
    Target(
        "bitsandbytes.backends.cuda.ops:_dequant_linear_fallback", ">= 0.50", TESTED_OP,
        LINEAR_4BIT, ".adapters.bitsandbytes:dequant_linear",
        "forward of Linear4bit in training, and its recompute under gradient checkpointing",
    ),
    MatmulTarget(
        "bitsandbytes.backends.cuda.ops:_gemm_4bit_kernel_impl", ">= 0.50", TESTED_OP,
        LINEAR_4BIT, ".adapters.bitsandbytes:gemm",
        'forward of Linear4bit on a few rows (generation), with enable(matmul="auto") only',
    ),
    MatmulTarget(
        "bitsandbytes.functional:gemv_4bit", ">= 0.43", TESTED_OP,
        (("A", "B", "out", "transposed_A", "transposed_B", "state"),), ".adapters.bitsandbytes:gemv",
        'gemv_4bit, which Linear4bit before 0.50 calls for one row (generation), with enable(matmul="auto") only',
        copied=True,
    ),
    MatmulTarget(
        "bitsandbytes.autograd._functions:matmul_4bit", ">= 0.43", TESTED_OP,
        (("A", "B", "quant_state", "out", "bias"),), ".adapters.bitsandbytes:matmul_4bit",
        'eager forward of Linear4bit on a few rows without a gradient, with enable(matmul="auto") only',
        copied=True,
    ),
    CacheTarget(
        "bitsandbytes.autograd._functions:MatMul4Bit.backward", ">= 0.43", TESTED_AUTOGRAD,
        (("ctx", "grad_output"),), ".cache.reads:reading",
        "cached weights in the backward of Linear4bit, with enable(cache=...) only",
    ),
    CacheTarget(
        "bitsandbytes.autograd._functions:MatMul4Bit.forward", ">= 0.43", TESTED_AUTOGRAD,
        (("ctx", "A", "B", "out", "bias", "quant_state"),), ".cache.reads:reading",
        "cached weights in the forward of Linear4bit before 0.50, with enable(cache=...) only",
    ),
    Target(
        "unsloth.kernels.utils:fast_dequantize", "<= 2026.9.12", ("2026.6.9", "2026.9.7"),
        (FAST_DEQUANTIZE,), ".adapters.unsloth:fast_dequantize",
        "every 4-bit weight of Unsloth's LoRA kernels, decoding and saving",
        unless="_fast_dequantize_bnb", copied=True,
    ),
    Target(
        "unsloth.kernels.utils:_fast_dequantize_bnb", ">= 2026.9.13", ("2026.9.14", "2026.10.9"),
        (FAST_DEQUANTIZE, (*FAST_DEQUANTIZE, "dtype")), ".adapters.unsloth:fast_dequantize",
        "every 4-bit weight of Unsloth's LoRA kernels, decoding and saving",
        own_kernel=OwnKernel(
            used="_USE_NF4_KERNELS",
            releases=">= 2026.10",
            # H200, torch 2.11, triton 3.6.0, Unsloth 2026.10.9: 7.6 us of the host per call against 11.1 into the global
            # buffer and 9.4 against 24.0 into a new tensor; 1.02x (591 MB) to 1.35x (2.6 MB) on the GPU.
            slower_on=((9, 0),),
            advice="Unsloth from 2026.10 on trains compiled layers, which keep its own NF4 kernel: training gains only with "
            'enable(cache="auto") or a size (PyTorch >= 2.11), where these layers read weights that were dequantized once.',
        ),
    ),
    MatmulTarget(
        "unsloth.kernels.utils:fast_gemv", "<= 2026.9.12", ("2026.9.7",),
        FAST_GEMV, ".adapters.unsloth:fast_gemv",
        'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
        unless="_fast_gemv_bnb", copied=True,
    ),
    MatmulTarget(
        "unsloth.kernels.utils:_fast_gemv_bnb", ">= 2026.9.13", ("2026.10.9",),
        FAST_GEMV, ".adapters.unsloth:fast_gemv",
        'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
    ),
    MatmulTarget(
        "unsloth.kernels.utils:_gemv_rows", ">= 2026.10.9", ("2026.10.9",),
        FAST_GEMV, ".adapters.unsloth:gemv_rows",
        'generation of 2 to UNSLOTH_GEMV_MAX_ROWS (4) sequences at once, with enable(matmul="auto") only',
    ),
    MatmulTarget(
        "unsloth.kernels.utils:matmul_lora", ">= 2026.9.7", TESTED_UNSLOTH,
        (MATMUL_LORA, (*MATMUL_LORA, "use_global_buffer")), ".adapters.unsloth:matmul_lora",
        'linear layers with LoRA on a few rows (short prompts), with enable(matmul="auto") only',
        copied=True,
    ),
    *(
        CacheTarget(
            f"unsloth.kernels.fast_lora:{name}.backward", ">= 2026.6", TESTED_UNSLOTH,
            (("ctx", *gradients),), ".cache.reads:reading",
            "cached weights in the backward of Unsloth's LoRA kernels, with enable(cache=...) only",
        )
        for name, gradients in (("LoRA_MLP", ("dY",)), ("LoRA_QKV", ("dQ", "dK", "dV")), ("LoRA_W", ("dY",)))
    ),
    CacheTarget(
        "unsloth.models._block_compile:_wrap", ">= 2026.10", ("2026.10.9",),
        (("cls", "compile_options", "kinds"),), ".adapters.unsloth:compiled_layers",
        "cached weights in Unsloth's compiled layers, with enable(cache=...) only",
    ),
    *(
        Target(
            f"{EXPERTS_INTERFACE}.{name}", ">= 5.0", TESTED_TRANSFORMERS,
            EXPERTS, f".adapters.transformers:{name}",
            f"mixtures of experts in 4 bits: {covers}",
            lazy=True,
        )
        for name, covers in (
            ("grouped_mm", "training saves the packed experts and not the dense ones"),
            ("batched_mm", "generation dequantizes the experts that are used and no other"),
        )
    ),
    Target(
        "liger_kernel.transformers.swiglu:LigerExperts.forward", ">= 0.8", ("0.8.5",),
        EXPERTS, ".adapters.transformers:ligers",
        'packed experts where Liger replaces their forward, with enable(experts="4bit") only',
        only="experts", lazy=True,
    ),
    *(
        PeftTarget(
            f"peft.tuners.{function}", ">= 0.17", ("0.21.2",),
            (parameters,), f".experts.lora:{replace}",
            f'{covers}, with enable(experts="4bit") only', stays=replace == "packed_again",
        )
        for function, parameters, replace, covers in (
            ("tuners_utils:BaseTuner.inject_adapter", INJECT, "inject", "target_modules and target_parameters find packed experts"),
            ("lora.layer:ParamWrapper.forward", ("self", "x", "args", "kwargs"), "forward",
             "LoRA on experts, a product of its own"),
            ("lora.layer:ParamWrapper.merge", ("self", "safe_merge", "adapter_names"), "packed_again",
             "adapters merged into packed experts"),
            ("lora.layer:ParamWrapper.unmerge", ("self",), "packed_again", "adapters taken out of packed experts again"),
        )
    ),
    Target(
        "peft.tuners.lora.bnb:Linear4bit.forward", ">= 0.17", ("0.17.0", "0.18.1", "0.19.0", "0.20.0", "0.21.2"),
        (("self", "x", "args", "kwargs"),), ".lora.linear:linear",
        'LoRA on 4-bit linear layers in one function, with enable(lora="fused") only',
        only="lora",
    ),
    *(
        LoadingTarget(
            f"transformers.{function}", ">= 5.17", TESTED_LOADING,
            (parameters,), f".adapters.transformers_loading:{replace}",
            covers,
            only=only, copied="." not in function.partition(":")[2],
        )
        for function, parameters, replace, only, covers in (
            ("quantizers.auto:get_hf_quantizer", HF_QUANTIZER, "quantizer_for", "experts", "gpt-oss in MXFP4"),
            (f"{QUANTIZER}.param_needs_quantization", ("self", "model", "param_name", "kwargs"), "needs_quantization",
             "experts", "which weights load_in_4bit packs"),
            ("integrations.bitsandbytes:Bnb4bitQuantize.convert",
             ("self", "input_dict", "full_layer_name", "model", "kwargs"), "quantize", "experts", "packing while loading"),
            ("core_model_loading:convert_and_load_state_dict_in_model",
             ("model", "state_dict", "load_config", "disk_offload_index"), "load", "", "checkpoints with packed experts"),
            (f"{QUANTIZER}._process_model_after_weight_loading", ("self", "model", "kwargs"), "finish", "experts",
             "the parametrization of packed experts"),
            ("core_model_loading:revert_weight_conversion", ("model", "state_dict"), "save", "", "saving packed experts"),
            (f"{QUANTIZER}._dequantize", ("self", "model", "dtype"), "dequantize", "experts",
             "model.dequantize() of packed experts"),
            ("modeling_utils:caching_allocator_warmup", ("model", "expanded_device_map", "hf_quantizer"), "warm_up", "offload",
             "memory that transformers reserves before it loads"),
        )
    ),
    CacheTarget(
        "torch.utils:swap_tensors", ">= 2.3", TESTED_TORCH,
        (("t1", "t2"),), ".cache.reads:swap_tensors",
        "parameters whose contents are swapped while their weights are cached, with enable(cache=...) only",
        after="bitsandbytes.functional",  # PyTorch is complete then
        copied=True,
    ),
    CacheTarget(
        "torch:UntypedStorage.resize_", ">= 2.0", TESTED_TORCH,
        ANY, ".cache.reads:resize",
        "memory that is freed and filled again (FSDP) while its weight is cached, with enable(cache=...) only",
        after="bitsandbytes.functional",
    ),
]  # fmt: skip
