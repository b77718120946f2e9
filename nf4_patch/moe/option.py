"""The option ``experts="4bit"``, which loads and trains mixtures of experts with the experts in 4 bits."""

from __future__ import annotations

from ..patching.option import Option

EXPERTS = Option(
    "NF4_PATCH_EXPERTS", ("off", "4bit"), "off",
    "4bit: transformers' `load_in_4bit` quantizes the experts of a mixture too. Off by default, because the experts lose precision.",
    on="4bit", calls="reads of experts",
)  # fmt: skip
