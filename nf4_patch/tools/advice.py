"""The table that tells users what to type for a model and a GPU, in ``nf4-patch doctor``, README and the docs."""

from typing import NamedTuple


class Advice(NamedTuple):
    key: str  # the key of the expectation that scripts/render_docs.py adds from the measured data
    model: str
    gpu: str
    line: str
    also: str = ""  # what else to set, separated by commas
    gigabytes: float = 0  # the GPU memory that Qwen3-30B-A3B needs, in 10^9 bytes, including CUDA's own


SETTINGS = "use_liger_kernel=True, pad_to_multiple_of=64"  # no gradient_checkpointing, because TRL sets it
UNSLOTH = "padding_free=False, pad_to_multiple_of=64"
FAST, EXPERTS = 'enable("fast")', 'enable("fast", experts="4bit"'
OFFLOAD = 'enable(experts="4bit", offload='  # as in the measured runs; graphs do not run with offload
SMALL = 'PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, optim="adamw_8bit", per_device_train_batch_size=1, max_length=2048'
DENSE = Advice("dense", "dense, TRL or peft", "A100, RTX 30 or newer", FAST, SETTINGS)
OLD = Advice(
    "old", "dense, TRL or peft", "T4, RTX 20", FAST, "bnb_4bit_compute_dtype=torch.float16, fp16=True, bf16=False"
)
OLD_UNSLOTH = Advice("old-unsloth", "dense, Unsloth 2026.10 or newer", "T4, RTX 20", 'enable(activations="auto")')
# The row that needs the most memory is first. With ample memory, the options of "fast" share what training leaves free.
MIXTURES = [
    Advice("mixture", "mixture of experts", "32 GB or more", f"{EXPERTS})", SETTINGS, 30),
    Advice("mixture-24", "mixture of experts", "24 GB", f'{EXPERTS}, cache="off")', f"{SMALL}, {SETTINGS}", 23),
    Advice("mixture-16", "mixture of experts", "16 GB", f'{OFFLOAD}"6GiB")', SMALL, 14.5),
    Advice("mixture-12", "mixture of experts", "12 GB", f'{OFFLOAD}"3GiB")', SMALL, 11.5),
    Advice("mixture-8", "mixture of experts, LoRA r = 8", "8 GB", f'{OFFLOAD}"all")', SMALL, 7),
]  # fmt: skip
TABLE = [
    DENSE,
    Advice("unsloth", "dense, Unsloth 2026.10 or newer", "A100, RTX 30 or newer", FAST, UNSLOTH),
    *MIXTURES,
    OLD,
    OLD_UNSLOTH,
    Advice("generation", "`generate()` with LoRA", "A100, RTX 30 or newer", FAST, 'cache_implementation="static"'),
    Advice("bits", "TRL or peft, with the same bits", "T4 or newer", "enable()"),
    Advice("none", "not in 4 bits of bitsandbytes", "any", "nothing"),
    Advice("none", "any", "AMD, Intel, Apple, older than a T4", "nothing"),
]  # fmt: skip


def mixture(gigabytes: float) -> Advice | None:
    """Return the advice for Qwen3-30B-A3B on a GPU with ``gigabytes`` * 10^9 bytes, or None if the GPU is too small."""
    return next((advice for advice in MIXTURES if advice.gigabytes <= gigabytes), None)
