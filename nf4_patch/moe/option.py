"""The option ``experts="4bit"``: load and train mixtures of experts with the experts in 4 bits."""

from __future__ import annotations

import functools

from ..patching.option import Option
from ..patching.target import ALWAYS, TESTED_LOADING, Target

FORWARD = (("self", "hidden_states", "top_k_index", "top_k_weights"),)
INJECT = ("self", "model", "adapter_name", "autocast_adapter_dtype", "low_cpu_mem_usage", "state_dict")
HF_QUANTIZER = ("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file")
TESTED_TRANSFORMERS = ("5.0.0", *TESTED_LOADING)
QUANTIZER = "quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer"
EXPERTS_INTERFACE = "transformers.integrations.moe:ExpertsInterface._global_mapping"

PeftTarget = functools.partial(Target, uncounted="the experts' forward counts")
LoadingTarget = functools.partial(Target, uncounted="it loads and saves models")


EXPERTS = Option(
    "NF4_PATCH_EXPERTS", ("off", "4bit"), "off",
    "4bit: transformers' `load_in_4bit` quantizes the experts of a mixture too. Off by default, because the experts lose precision.",
    on="4bit", calls="reads of experts",
    targets=(
        *(
            Target(
                f"{EXPERTS_INTERFACE}.{name}", ">= 5.0", TESTED_TRANSFORMERS,
                FORWARD, f".moe.transformers:{name}",
                f'{covers}, with enable(experts="4bit") only',
                option="experts", own=(f"{name}_experts_forward",),
            )
            for name, covers in (
                ("grouped_mm", "training, which saves packed experts for the backward instead of dense ones"),
                ("batched_mm", "generation, which dequantizes only the experts that are used"),
            )
        ),
        Target(
            "liger_kernel.transformers.swiglu:LigerExperts.forward", ">= 0.8", ("0.8.5",),
            FORWARD, ".moe.transformers:grouped_mm",
            'training of packed experts whose forward Liger replaced, with enable(experts="4bit") only',
            option="experts", own=("forward",),
        ),
        *(
            PeftTarget(
                f"peft.{function}", ">= 0.17", ("0.21.0", "0.21.2"),
                (parameters,), f".moe.lora:{replace}",
                covers, option="experts" if replace == "forward" else ALWAYS, own=("forward",) if replace == "forward" else (),
            )
            for function, parameters, replace, covers in (
                ("config:PeftConfigMixin.from_json_file", ("cls", "path_json_file", "kwargs"), "read_config", "loading adapters in a layout that peft cannot read"),
                ("tuners.tuners_utils:BaseTuner.inject_adapter", INJECT, "inject", "target_modules and target_parameters that name packed experts"),
                ("tuners.lora.layer:ParamWrapper.forward", ("self", "x", "args", "kwargs"), "forward",
                 'LoRA on experts, computed without merging, with enable(experts="4bit") only'),
                ("tuners.lora.layer:ParamWrapper.merge", ("self", "safe_merge", "adapter_names"), "packed_again",
                 "merging adapters into packed experts"),
                ("tuners.lora.layer:ParamWrapper.unmerge", ("self",), "packed_again", "unmerging adapters from packed experts"),
            )
        ),
        *(
            LoadingTarget(
                f"transformers.{function}", ">= 5.17", TESTED_LOADING,
                (parameters,), f".moe.loading:{replace}",
                covers,
                option=option, patch_copies="." not in function.partition(":")[2],
            )
            for function, parameters, replace, option, covers in (
                ("quantizers.auto:get_hf_quantizer", HF_QUANTIZER, "quantizer_for", "experts", "loading gpt-oss, whose checkpoint is in MXFP4, in 4 bits"),
                (f"{QUANTIZER}.param_needs_quantization", ("self", "model", "param_name", "kwargs"), "needs_quantization",
                 "experts", "the choice of the weights that load_in_4bit quantizes"),
                ("integrations.bitsandbytes:Bnb4bitQuantize.convert",
                 ("self", "input_dict", "full_layer_name", "model", "kwargs"), "quantize", "experts", "quantizing experts while they are loaded"),
                ("core_model_loading:convert_and_load_state_dict_in_model",
                 ("model", "state_dict", "load_config", "disk_offload_index"), "load", "", "loading checkpoints with packed experts"),
                (f"{QUANTIZER}._process_model_after_weight_loading", ("self", "model", "kwargs"), "finish", "experts",
                 "the parametrization of packed experts"),
                ("core_model_loading:revert_weight_conversion", ("model", "state_dict"), "save", ALWAYS, "saving packed experts"),
                (f"{QUANTIZER}._dequantize", ("self", "model", "dtype"), "dequantize", ALWAYS,
                 "model.dequantize() of packed experts"),
            )
        ),
    ),
)  # fmt: skip
