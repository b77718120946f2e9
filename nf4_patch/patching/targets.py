"""What is replaced: one row a target."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .switch import SWITCHES as SWITCHES
from .switch import switch

logger = logging.getLogger("nf4_patch")
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
    measured: str
    advice: str

    def in_use(self, module: str) -> bool:
        return bool(getattr(sys.modules.get(module), self.used, False))

    def keeps_eager_calls(self) -> bool:
        """Whether it was not measured to be slower on every GPU here."""
        return not _slower_everywhere(self.slower_on)


@functools.cache
def _slower_everywhere(slower_on: tuple[tuple[int, int], ...]) -> bool:
    import torch

    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return all(capability in slower_on for capability in capabilities)


@dataclass(frozen=True)
class Target:
    """One function of one module."""

    function: str  # "module:attribute", dotted for a static method of a class, or an entry of a dict of one
    releases: str  # for people: which releases have it
    tested: tuple[str, ...]  # releases that the tests ran with
    parameters: tuple[Parameters, ...]  # the signatures that the replacement adapts
    replace: str  # "module:function", of this package ".module:function": makes the replacement of (row, original)
    covers: str
    unless: str = ""  # an attribute of the module that makes this row void
    only: str = ""  # "matmul", "cache", "experts": in place only where that is switched on
    lazy: bool = False  # its package imports the module only when it is used
    after: str = ""  # installed when this module is imported, and not with its own
    uncounted: str = ""  # what ``status()`` says of a row whose calls are neither hits nor fallbacks
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


EXPERTS = ("self", "hidden_states", "top_k_index", "top_k_weights")
FAST_GEMV = ("X", "W", "quant_state", "out")
MATMUL_LORA = ("X", "W", "W_quant", "A", "B", "s", "out")
FAST_DEQUANTIZE = ("W", "quant_state", "out", "use_global_buffer")
SECOND_LEVEL = ("absmax_8bit", "absmax_code", "absmax_offset")
LINEAR_4BIT = ("A", "B", "shapeB", "absmax", "blocksize", "quant_type", "bias", *SECOND_LEVEL)
# Releases that scripts/release_matrix.py ran; docs/data/releases.json says on which machine.
TESTED_OP_RELEASES = ("0.50.2",)
TESTED_BITSANDBYTES = ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.2")
TESTED_PEFT = ("0.21.2",)

HF_QUANTIZER = ("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file")
QUANTIZER = "quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer"
CONVERT = "integrations.bitsandbytes:Bnb4bitQuantize.convert"
LOAD = "core_model_loading:convert_and_load_state_dict_in_model"
LOADING = (  # of transformers: function, parameters, replace, only, covers
    ("quantizers.auto:get_hf_quantizer", HF_QUANTIZER, "quantizer_for", "experts", "gpt-oss in MXFP4"),
    (f"{QUANTIZER}.param_needs_quantization", ("self", "model", "param_name", "kwargs"), "needs_quantization", "experts",
     "which weights load_in_4bit packs"),
    (CONVERT, ("self", "input_dict", "full_layer_name", "model", "kwargs"), "quantize", "experts", "packing while loading"),
    (LOAD, ("model", "state_dict", "load_config", "disk_offload_index"), "load", "", "checkpoints with packed experts"),
    (f"{QUANTIZER}._process_model_after_weight_loading", ("self", "model", "kwargs"), "finish", "experts",
     "the parametrization of packed experts"),
    ("core_model_loading:revert_weight_conversion", ("model", "state_dict"), "save", "", "saving packed experts"),
    (f"{QUANTIZER}._dequantize", ("self", "model", "dtype"), "dequantize", "experts", "model.dequantize() of packed experts"),
)  # fmt: skip

MatmulTarget = functools.partial(Target, only="matmul")
ExpertsTarget = functools.partial(Target, only="experts")
CacheTarget = functools.partial(Target, only="cache", uncounted="its reads may come from the cache")

TARGETS: list[Target] = [
    Target(
        function="bitsandbytes.functional:dequantize_4bit",
        releases=">= 0.43",
        tested=TESTED_BITSANDBYTES,
        parameters=(("A", "quant_state", "absmax", "out", "blocksize", "quant_type"),),
        replace=".adapters.bitsandbytes:dequantize_4bit",
        covers="backward of every Linear4bit, forward before 0.50; peft merge and DoRA; model.dequantize()",
        copied=True,
    ),
    Target(
        function="bitsandbytes.backends.cuda.ops:_dequant_linear_fallback",
        releases=">= 0.50",
        tested=TESTED_OP_RELEASES,
        parameters=(LINEAR_4BIT,),
        replace=".adapters.bitsandbytes:dequant_linear",
        covers="forward of Linear4bit in training, and its recompute under gradient checkpointing",
    ),
    MatmulTarget(
        function="bitsandbytes.backends.cuda.ops:_gemm_4bit_kernel_impl",
        releases=">= 0.50",
        tested=TESTED_OP_RELEASES,
        parameters=(LINEAR_4BIT,),
        replace=".adapters.bitsandbytes:gemm",
        covers='forward of Linear4bit on a few rows (generation), with enable(matmul="auto") only',
    ),
    MatmulTarget(
        function="bitsandbytes.functional:gemv_4bit",
        releases=">= 0.43",
        tested=TESTED_OP_RELEASES,
        parameters=(("A", "B", "out", "transposed_A", "transposed_B", "state"),),
        replace=".adapters.bitsandbytes:gemv",
        covers='gemv_4bit, which Linear4bit before 0.50 calls for one row (generation), with enable(matmul="auto") only',
        copied=True,
    ),
    MatmulTarget(
        function="bitsandbytes.autograd._functions:matmul_4bit",
        releases=">= 0.43",
        tested=TESTED_OP_RELEASES,
        parameters=(("A", "B", "quant_state", "out", "bias"),),
        replace=".adapters.bitsandbytes:matmul_4bit",
        covers='eager forward of Linear4bit on a few rows without a gradient, with enable(matmul="auto") only',
        copied=True,
    ),
    CacheTarget(
        function="bitsandbytes.autograd._functions:MatMul4Bit.backward",
        releases=">= 0.43",
        tested=("0.49.2", "0.50.2"),
        parameters=(("ctx", "grad_output"),),
        replace=".cache.reads:reading",
        covers="cached weights in the backward of Linear4bit, with enable(cache=...) only",
    ),
    CacheTarget(
        function="bitsandbytes.autograd._functions:MatMul4Bit.forward",
        releases=">= 0.43",
        tested=("0.49.2", "0.50.2"),
        parameters=(("ctx", "A", "B", "out", "bias", "quant_state"),),
        replace=".cache.reads:reading",
        covers="cached weights in the forward of Linear4bit before 0.50, with enable(cache=...) only",
    ),
    Target(
        function="unsloth.kernels.utils:fast_dequantize",
        releases="<= 2026.9.12",
        tested=("2026.6.9", "2026.9.7"),
        parameters=(FAST_DEQUANTIZE,),
        replace=".adapters.unsloth:fast_dequantize",
        covers="every 4-bit weight of Unsloth's LoRA kernels, decoding and saving",
        unless="_fast_dequantize_bnb",
        copied=True,
    ),
    Target(
        function="unsloth.kernels.utils:_fast_dequantize_bnb",
        own_kernel=OwnKernel(
            used="_USE_NF4_KERNELS",
            releases=">= 2026.10",
            slower_on=((9, 0),),
            measured="H200, torch 2.11, triton 3.6.0, Unsloth 2026.10.9: 7.6 us of the host per call against 11.1 into the "
            "global buffer and 9.4 against 24.0 into a new tensor; 1.02x (591 MB) to 1.35x (2.6 MB) on the GPU",
            advice="Unsloth from 2026.10 on trains compiled layers, which keep its own NF4 kernel: training gains only with "
            'enable(cache="auto") or a size (PyTorch >= 2.11), where these layers read weights that were dequantized once.',
        ),
        releases=">= 2026.9.13",
        tested=("2026.9.14", "2026.10.9"),
        parameters=(FAST_DEQUANTIZE, (*FAST_DEQUANTIZE, "dtype")),
        replace=".adapters.unsloth:fast_dequantize",
        covers="every 4-bit weight of Unsloth's LoRA kernels, decoding and saving",
    ),
    MatmulTarget(
        function="unsloth.kernels.utils:fast_gemv",
        releases="<= 2026.9.12",
        tested=("2026.9.7",),
        parameters=(FAST_GEMV,),
        replace=".adapters.unsloth:fast_gemv",
        covers='one row of every 4-bit weight (generation), with enable(matmul="auto") only',
        unless="_fast_gemv_bnb",
        copied=True,
    ),
    MatmulTarget(
        function="unsloth.kernels.utils:_fast_gemv_bnb",
        releases=">= 2026.9.13",
        tested=("2026.10.9",),
        parameters=(FAST_GEMV,),
        replace=".adapters.unsloth:fast_gemv",
        covers='one row of every 4-bit weight (generation), with enable(matmul="auto") only',
    ),
    MatmulTarget(
        function="unsloth.kernels.utils:_gemv_rows",
        releases=">= 2026.10.9",
        tested=("2026.10.9",),
        parameters=(FAST_GEMV,),
        replace=".adapters.unsloth:gemv_rows",
        covers='generation of 2 to UNSLOTH_GEMV_MAX_ROWS (4) sequences at once, with enable(matmul="auto") only',
    ),
    MatmulTarget(
        function="unsloth.kernels.utils:matmul_lora",
        releases=">= 2026.9.7",
        tested=("2026.9.7", "2026.10.9"),
        parameters=(MATMUL_LORA, (*MATMUL_LORA, "use_global_buffer")),
        replace=".adapters.unsloth:matmul_lora",
        covers='linear layers with LoRA on a few rows (short prompts), with enable(matmul="auto") only',
        copied=True,
    ),
    *(
        CacheTarget(
            function=f"unsloth.kernels.fast_lora:{name}.backward",
            releases=">= 2026.6",
            tested=("2026.9.7", "2026.10.9"),
            parameters=(("ctx", *gradients),),
            replace=".cache.reads:reading",
            covers="cached weights in the backward of Unsloth's LoRA kernels, with enable(cache=...) only",
        )
        for name, gradients in (("LoRA_MLP", ("dY",)), ("LoRA_QKV", ("dQ", "dK", "dV")), ("LoRA_W", ("dY",)))
    ),
    CacheTarget(
        function="unsloth.models._block_compile:_wrap",
        releases=">= 2026.10",
        tested=("2026.10.9",),
        parameters=(("cls", "compile_options", "kinds"),),
        replace=".adapters.unsloth:compiled_layers",
        covers="cached weights in Unsloth's compiled layers, with enable(cache=...) only",
    ),
    Target(
        function="transformers.integrations.moe:ExpertsInterface._global_mapping.grouped_mm",
        releases=">= 5.0",
        tested=("5.0.0", "5.17.0", "5.23.0", "5.24.0"),
        parameters=(EXPERTS,),
        lazy=True,
        replace=".adapters.transformers:grouped_mm",
        covers="mixtures of experts in 4 bits: training saves the packed experts and not the dense ones",
    ),
    Target(
        function="transformers.integrations.moe:ExpertsInterface._global_mapping.batched_mm",
        releases=">= 5.0",
        tested=("5.0.0", "5.17.0", "5.23.0", "5.24.0"),
        parameters=(EXPERTS,),
        lazy=True,
        replace=".adapters.transformers:batched_mm",
        covers="mixtures of experts in 4 bits: generation dequantizes the experts that are used and no other",
    ),
    *(
        ExpertsTarget(
            function=f"peft.tuners.{function}",
            releases=">= 0.17",
            tested=TESTED_PEFT,
            parameters=(("self", *parameters),),
            replace=f".experts.lora:{replace}",
            covers=f'{covers}, with enable(experts="4bit") only',
            uncounted="the experts' forward counts",
        )
        for function, parameters, replace, covers in (
            (
                "tuners_utils:BaseTuner._inject_parameters",
                ("peft_config", "model", "adapter_name", "low_cpu_mem_usage"),
                "inject",
                "target_parameters finds packed experts",
            ),
            (
                "lora.layer:ParamWrapper.forward",
                ("x", "args", "kwargs"),
                "forward",
                "LoRA on experts, a product of its own",
            ),
            (
                "lora.layer:ParamWrapper.merge",
                ("safe_merge", "adapter_names"),
                "packed_again",
                "adapters merged into packed experts",
            ),
            ("lora.layer:ParamWrapper.unmerge", (), "packed_again", "adapters taken out of packed experts again"),
        )
    ),
    *(
        Target(
            function=f"transformers.{function}",
            releases=">= 5.17",
            tested=("5.17.0", "5.23.0", "5.24.0"),
            parameters=(parameters,),
            replace=f".adapters.transformers_loading:{replace}",
            covers=covers,
            only=only,
            lazy=True,
            uncounted="it loads and saves models",
            copied="." not in function.partition(":")[2],
        )
        for function, parameters, replace, only, covers in LOADING
    ),
    CacheTarget(
        function="torch.utils:swap_tensors",
        after="bitsandbytes.functional",  # PyTorch is complete then
        releases=">= 2.3",
        tested=("2.11.0", "2.13.0"),
        parameters=(("t1", "t2"),),
        replace=".cache.reads:swap_tensors",
        covers="parameters whose contents are swapped while their weights are cached, with enable(cache=...) only",
    ),
    CacheTarget(
        function="torch:UntypedStorage.resize_",
        after="bitsandbytes.functional",
        releases=">= 2.0",
        tested=("2.11.0", "2.13.0"),
        parameters=ANY,
        replace=".cache.reads:resize",
        covers="memory that is freed and filled again (FSDP) while its weight is cached, with enable(cache=...) only",
    ),
]


def registered() -> list[Target]:
    """The rows of other packages: entry points of the group "nf4_patch.targets", each a Target or a list of them."""
    rows: list[Target] = []
    for point in importlib.metadata.entry_points(group="nf4_patch.targets"):
        try:
            found = point.load()
            found = found if isinstance(found, list) else [found]
            if not all(isinstance(row, Target) for row in found):
                raise TypeError("it is no Target and no list of them")
            rows += found
        except Exception as error:  # another package's fault leaves our own rows alone
            logger.warning("nf4_patch leaves out the rows of %s: %s: %s", point.value, type(error).__name__, error)
    return rows
