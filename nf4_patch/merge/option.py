"""The option ``merge="reversible"``, after which ``unmerge_adapter()`` restores the packed bytes of linear layers."""

from __future__ import annotations

from ..patching.option import Option

MERGE = Option(
    "NF4_PATCH_MERGE", ("off", "reversible"), "off",
    "reversible: unmerging restores the packed bytes that a 4-bit linear layer had before adapters were merged into it. peft "
    "quantizes the layer again, which changes it a little each time. Takes host memory for one copy of the packed weights.",
    on="reversible", fast="reversible", calls="unmerged layers",
)  # fmt: skip
