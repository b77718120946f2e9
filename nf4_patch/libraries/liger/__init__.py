"""Everything that nf4_patch replaces in Liger-Kernel."""

from __future__ import annotations

from ...patching.target import Target
from ...patching.targets import Library
from ..transformers import EXPERTS_FORWARD

SWIGLU = "liger_kernel.transformers.swiglu"

LIBRARY = Library(
    targets=(
        Target(
            f"{SWIGLU}:LigerExperts.forward", ">= 0.8", ("0.8.5",),
            EXPERTS_FORWARD, ".libraries.transformers.experts:grouped_mm",
            'training of packed experts whose forward Liger replaced, with enable(experts="4bit") only',
            option="experts", own=("forward",),
        ),
    ),
    modules={"fused experts": SWIGLU},
)  # fmt: skip
