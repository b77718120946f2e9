"""Everything that nf4_patch replaces in peft."""

from __future__ import annotations

from ...patching.target import ALWAYS, Target
from ...patching.targets import Library

TESTED = ("0.17.0", "0.18.1", "0.19.0", "0.20.0", "0.21.0", "0.21.2")
TESTED_EXPERTS = ("0.21.0", "0.21.2")
LINEAR_LAYERS = "peft.tuners.lora.bnb"
LINEAR = f"{LINEAR_LAYERS}:Linear4bit"
INJECT = ("self", "model", "adapter_name", "autocast_adapter_dtype", "low_cpu_mem_usage", "state_dict")

LIBRARY = Library(
    targets=(
        Target(
            f"{LINEAR}.forward", ">= 0.17", TESTED,
            (("self", "x", "args", "kwargs"),), ".libraries.peft.linear:linear",
            "forward of LoRA on 4-bit linear layers: as one function with enable(lora=\"fused\"), and on few rows without a "
            'gradient (generation) with enable(matmul="auto")',
            option="lora", or_option="matmul",
        ),
        *(
            Target(
                f"peft.{function}", ">= 0.17", TESTED_EXPERTS,
                (parameters,), f".libraries.peft.experts:{replace}",
                covers, option="experts" if replace == "forward" else ALWAYS, own=("forward",) if replace == "forward" else (),
                uncounted="the experts' forward counts",
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
            Target(
                f"{LINEAR}.{name}", ">= 0.17", TESTED,
                (parameters,), f".libraries.peft.merge:{name}",
                f'{covers} 4-bit linear layers, with enable(merge="reversible") or enable(offload=...) only',
                option="merge", or_option="offload", uncounted="no weight is dequantized by it",
            )
            for name, parameters, covers in (
                ("merge", ("self", "safe_merge", "adapter_names"), "merging adapters into"),
                ("unmerge", ("self",), "unmerging adapters from"),
            )
        ),
    ),
    modules={"LoRA layers": "peft.tuners.lora.layer"},
)  # fmt: skip
