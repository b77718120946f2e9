"""Everything that nf4_patch replaces in transformers."""

from __future__ import annotations

import functools

from ...patching.target import ALWAYS, Target
from ...patching.targets import Library

TESTED_LOADING = ("5.17.0", "5.23.0", "5.24.0")
TESTED_EXPERTS = ("5.0.0", *TESTED_LOADING)
EXPERTS_FORWARD = (("self", "hidden_states", "top_k_index", "top_k_weights"),)
EXPERTS = "transformers.integrations.moe"
EXPERTS_INTERFACE = f"{EXPERTS}:ExpertsInterface._global_mapping"
HF_QUANTIZER = ("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file")
QUANTIZER = "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer"

LoadingTarget = functools.partial(Target, uncounted="it loads and saves models")

LIBRARY = Library(
    targets=(
        Target(
            "transformers.modeling_layers:GradientCheckpointingLayer.__call__", ">= 4.53", ("4.56.2", "5.17.0", "5.24.0"),
            (("self", "args", "kwargs"),), ".libraries.transformers.layers:decoder_layer",
            'decoder layers run as CUDA graphs in training with gradient checkpointing and in generation with a static cache, with '
            'enable(graphs="auto") only, or keep their activations, with enable(activations=...) only',
            option="graphs", or_option="activations", uncounted="status().graphs counts its replays",
        ),
        Target(
            "transformers.generation.utils:GenerationMixin._valid_auto_compile_criteria", ">= 5.17", ("5.17.0", "5.24.0"),
            (("self", "model_kwargs", "generation_config"),), ".libraries.transformers.layers:valid_auto_compile_criteria",
            'generate() asks for the function that runs its decode steps, with enable(graphs="auto") only',
            option="graphs", uncounted="status().graphs counts its replays",
        ),
        Target(
            "transformers.modeling_utils:PreTrainedModel.get_compiled_call", ">= 5.17", ("5.17.0", "5.24.0"),
            (("self", "compile_config"),), ".libraries.transformers.layers:compiled_call",
            'decode steps of generate() with a static cache run as one CUDA graph, with enable(graphs="auto") only',
            option="graphs", uncounted="status().graphs counts its replays",
        ),
        *(
            Target(
                f"transformers.generation.utils:{function}", ">= 5.17", ("5.17.0", "5.24.0"),
                (parameters,), f".libraries.transformers.layers:{replace}",
                covers + ', with enable(graphs="auto") only',
                option="graphs", uncounted="status().graphs counts the replays",
            )
            for function, parameters, replace, covers in (
                ("GenerationMixin._sample",
                 ("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "model_kwargs"),
                 "sample", "whether generate() may learn one token late that it has to stop"),
                ("DeferredStopCheck.is_supported", ("device", "cache", "cache_is_returned", "is_assistant"), "is_supported",
                 "generate() does not wait for the GPU at each token"),
            )
        ),
        Target(
            "transformers.integrations.sdpa_attention:repeat_kv", ">= 4.53", ("4.56.2", "5.17.0", "5.24.0"),
            (("hidden_states", "n_rep"),), ".libraries.transformers.layers:repeat_kv",
            'keys and values are copied for each head that reads them in words of 16 bytes, with enable(graphs="auto") only',
            option="graphs", uncounted="status().graphs counts the replays",
        ),
        *(
            Target(
                f"{EXPERTS_INTERFACE}.{name}", ">= 5.0", TESTED_EXPERTS,
                EXPERTS_FORWARD, f".libraries.transformers.experts:{name}",
                f'{covers}, with enable(experts="4bit") only',
                option="experts", own=(f"{name}_experts_forward",),
            )
            for name, covers in (
                ("grouped_mm", "training, which saves packed experts for the backward instead of dense ones"),
                ("batched_mm", "generation, which dequantizes only the experts that are used"),
            )
        ),
        *(
            LoadingTarget(
                function, ">= 5.17", TESTED_LOADING,
                (parameters,), f".libraries.transformers.loading:{replace}",
                covers,
                option=option, patch_copies="." not in function.partition(":")[2],
            )
            for function, parameters, replace, option, covers in (
                ("transformers.quantizers.auto:get_hf_quantizer", HF_QUANTIZER, "quantizer_for", "experts", "loading gpt-oss, whose checkpoint is in MXFP4, in 4 bits"),
                (f"{QUANTIZER}.param_needs_quantization", ("self", "model", "param_name", "kwargs"), "needs_quantization",
                 "experts", "the choice of the weights that load_in_4bit quantizes"),
                ("transformers.integrations.bitsandbytes:Bnb4bitQuantize.convert",
                 ("self", "input_dict", "full_layer_name", "model", "kwargs"), "quantize", "experts", "quantizing experts while they are loaded"),
                ("transformers.core_model_loading:convert_and_load_state_dict_in_model",
                 ("model", "state_dict", "load_config", "disk_offload_index"), "load", "", "loading checkpoints with packed experts"),
                (f"{QUANTIZER}._process_model_after_weight_loading", ("self", "model", "kwargs"), "finish", "experts",
                 "the parametrization of packed experts"),
                ("transformers.core_model_loading:revert_weight_conversion", ("model", "state_dict"), "save", ALWAYS, "saving packed experts"),
                (f"{QUANTIZER}._dequantize", ("self", "model", "dtype"), "dequantize", ALWAYS,
                 "model.dequantize() of packed experts"),
            )
        ),
        *(
            LoadingTarget(
                function, ">= 5.17", TESTED_LOADING,
                (parameters,), f".libraries.transformers.offload:{replace}",
                covers,
                option=option, patch_copies=True,
            )
            for function, parameters, replace, option, covers in (
                ("transformers.modeling_utils:caching_allocator_warmup", ("model", "expanded_device_map", "hf_quantizer"), "warm_up", "",
                 "the memory that transformers reserves before it loads a model"),
                ("transformers.core_model_loading:set_param_for_module",
                 ("model", "target_name", "param_value", "loading_info", "hf_quantizer"), "put",
                 "offload", "moving packed weights to host memory while a model is loaded"),
            )
        ),
    ),
    modules={
        "models": "transformers.modeling_utils",
        "decoder layers": "transformers.modeling_layers",
        "generation": "transformers.generation.utils",
        "registries of functions": "transformers.utils.generic",
        "static caches": "transformers.cache_utils",
        "collected outputs": "transformers.utils.output_capturing",
        "experts": EXPERTS,
        "activation functions": "transformers.activations",
    },
    folders=("transformers_modules",),
)  # fmt: skip
