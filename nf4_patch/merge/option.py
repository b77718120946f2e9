"""The option ``merge="reversible"``, after which ``unmerge_adapter()`` restores the packed bytes of linear layers."""

from __future__ import annotations

from ..patching.option import Option
from ..patching.target import Target

TESTED_PEFT = ("0.17.0", "0.18.1", "0.19.0", "0.20.0", "0.21.0", "0.21.2")

MERGE = Option(
    "NF4_PATCH_MERGE", ("off", "reversible"), "off",
    "reversible: unmerging restores the packed bytes that a 4-bit linear layer had before adapters were merged into it. peft "
    "quantizes the layer again, and so changes it a little each time. Takes host memory for one copy of the packed weights.",
    on="reversible", fast="reversible",
    targets=tuple(
        Target(
            f"peft.tuners.lora.bnb:Linear4bit.{name}", ">= 0.17", TESTED_PEFT,
            (parameters,), f".merge.linear:{name}",
            f'{covers} 4-bit linear layers, with enable(merge="reversible") or enable(offload=...) only',
            option="merge", or_option="offload", uncounted="no weight is dequantized by it",
        )
        for name, parameters, covers in (
            ("merge", ("self", "safe_merge", "adapter_names"), "merging adapters into"),
            ("unmerge", ("self",), "unmerging adapters from"),
        )
    ),
)  # fmt: skip
