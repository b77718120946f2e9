"""The option ``lora="fused"``, which runs peft's LoRA on 4-bit linear layers as one function."""

from __future__ import annotations

from ..patching.option import Option

LORA = Option(
    "NF4_PATCH_LORA", ("off", "fused"), "off",
    "fused: run peft's LoRA on 4-bit linear layers as one function. Off by default, because results are as accurate as peft's, but "
    "not bit-identical.",
    on="fused", fast="fused", calls="layer calls",
)  # fmt: skip
