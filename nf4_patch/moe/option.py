"""The option ``experts="4bit"`` and its targets: functions of transformers, Liger and peft."""

from __future__ import annotations

import functools

from ..patching.option import Option
from ..patching.target import TESTED_LOADING, Target

FORWARD = (("self", "hidden_states", "top_k_index", "top_k_weights"),)
INJECT = ("self", "model", "adapter_name", "autocast_adapter_dtype", "low_cpu_mem_usage", "state_dict")
HF_QUANTIZER = ("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file")
TESTED_TRANSFORMERS = ("5.0.0", *TESTED_LOADING)
QUANTIZER = "quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer"
EXPERTS_INTERFACE = "transformers.integrations.moe:ExpertsInterface._global_mapping"

PeftTarget = functools.partial(Target, option="experts", uncounted="the experts' forward counts")
LoadingTarget = functools.partial(Target, lazy=True, uncounted="it loads and saves models")


EXPERTS = Option(
    "NF4_PATCH_EXPERTS", ("off", "4bit"), "off",
    "4bit: transformers' load_in_4bit packs the experts of a mixture too. Off by default, because it changes the quantization.",
    on="4bit",
    targets=(
        *(
            Target(
                f"{EXPERTS_INTERFACE}.{name}", ">= 5.0", TESTED_TRANSFORMERS,
                FORWARD, f".moe.transformers:{name}",
                f'{covers}, with enable(experts="4bit") only',
                option="experts", lazy=True,
            )
            for name, covers in (
                ("grouped_mm", "training that saves the packed experts instead of the dense ones"),
                ("batched_mm", "generation that dequantizes only the experts that are used"),
            )
        ),
        Target(
            "liger_kernel.transformers.swiglu:LigerExperts.forward", ">= 0.8", ("0.8.5",),
            FORWARD, ".moe.transformers:grouped_mm",
            'packed experts where Liger replaces their forward, with enable(experts="4bit") only',
            option="experts", lazy=True,
        ),
        *(
            PeftTarget(
                f"peft.{function}", ">= 0.17", ("0.21.0", "0.21.2"),
                (parameters,), f".moe.lora:{replace}",
                f'{covers}, with enable(experts="4bit") only', permanent=replace != "forward",
            )
            for function, parameters, replace, covers in (
                ("config:_check_and_remove_unused_kwargs", ("cls", "kwargs"), "keep_layout", "adapters in a layout that peft cannot read"),
                ("tuners.tuners_utils:BaseTuner.inject_adapter", INJECT, "inject", "packed experts in target_modules and target_parameters"),
                ("tuners.lora.layer:ParamWrapper.forward", ("self", "x", "args", "kwargs"), "forward",
                 "LoRA on experts as a separate product"),
                ("tuners.lora.layer:ParamWrapper.merge", ("self", "safe_merge", "adapter_names"), "packed_again",
                 "adapters merged into packed experts"),
                ("tuners.lora.layer:ParamWrapper.unmerge", ("self",), "packed_again", "adapters unmerged from packed experts"),
            )
        ),
        *(
            LoadingTarget(
                f"transformers.{function}", ">= 5.17", TESTED_LOADING,
                (parameters,), f".moe.loading:{replace}",
                covers,
                option=only, patch_copies="." not in function.partition(":")[2], permanent=replace in ("save", "dequantize"),
            )
            for function, parameters, replace, only, covers in (
                ("quantizers.auto:get_hf_quantizer", HF_QUANTIZER, "quantizer_for", "experts", "gpt-oss in MXFP4"),
                (f"{QUANTIZER}.param_needs_quantization", ("self", "model", "param_name", "kwargs"), "needs_quantization",
                 "experts", "the weights that load_in_4bit packs"),
                ("integrations.bitsandbytes:Bnb4bitQuantize.convert",
                 ("self", "input_dict", "full_layer_name", "model", "kwargs"), "quantize", "experts", "packing while loading"),
                ("core_model_loading:convert_and_load_state_dict_in_model",
                 ("model", "state_dict", "load_config", "disk_offload_index"), "load", "", "checkpoints with packed experts"),
                (f"{QUANTIZER}._process_model_after_weight_loading", ("self", "model", "kwargs"), "finish", "experts",
                 "the parametrization of packed experts"),
                ("core_model_loading:revert_weight_conversion", ("model", "state_dict"), "save", "", "saving packed experts"),
                (f"{QUANTIZER}._dequantize", ("self", "model", "dtype"), "dequantize", "experts",
                 "model.dequantize() of packed experts"),
            )
        ),
    ),
)  # fmt: skip
