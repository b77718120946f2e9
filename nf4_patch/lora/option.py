"""The option ``lora="fused"``, which runs peft's LoRA on 4-bit linear layers as one function."""

from __future__ import annotations

from ..patching.option import Option
from ..patching.target import Target

LORA = Option(
    "NF4_PATCH_LORA", ("off", "fused"), "off",
    "fused: run peft's LoRA on 4-bit linear layers as one function. Off by default, because results are as accurate as peft's but "
    "not bit-identical.",
    on="fused", fast="fused", calls="layer calls",
    targets=(
        Target(
            "peft.tuners.lora.bnb:Linear4bit.forward", ">= 0.17", ("0.17.0", "0.18.1", "0.19.0", "0.20.0", "0.21.0", "0.21.2"),
            (("self", "x", "args", "kwargs"),), ".lora.linear:linear",
            "forward of LoRA on 4-bit linear layers: as one function with enable(lora=\"fused\"), and on few rows without a "
            'gradient (generation) with enable(matmul="auto")',
            option="lora", or_option="matmul",
        ),
    ),
)  # fmt: skip
