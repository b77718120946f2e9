"""Every "no" has a name: why a call ran the original."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """Why a call ran the original: (sentence, advice). Advice is "" where there is nothing to do."""

    NOT_4BIT = ("the weight has no bitsandbytes 4-bit state (unquantized, fp8, NVFP4, int4 or a list state)", "")
    NOT_CUDA = ("the packed weight is not on a CUDA GPU", "move the model to the GPU")
    ROCM = ("this PyTorch is built for ROCm; the kernel is NVIDIA PTX", "")
    CAPABILITY = ("the GPU is older than compute capability 7.5 (Tesla T4)", "")
    TRANSFORM = ("a functorch transform (vmap, grad, ...) is active", "")
    MODE = ("a dispatch mode is active, and the fused product is no operator that it could see", "")
    SUBCLASS = ("a tensor of the weight is a subclass with its own dispatch (DTensor, FakeTensor, ...)", "")
    EXPORT = (
        "torch.export or torch.jit.trace is recording a program, which has to run where nf4_patch is not",
        "",
    )
    ARGUMENTS = ("called without a weight or quant_state, or with an argument that differs from the quant_state", "")
    CPU_PACKING = ("the weight is in bitsandbytes' CPU packing", "move the model with model.to('cuda')")
    QUANT_TYPE = ("quant_type is neither nf4 nor fp4", "")
    DTYPE = (
        "the output dtype is not float16, bfloat16 or float32",
        "set bnb_4bit_compute_dtype to one of them",
    )
    STORAGE = ("quant_storage is not uint8, float16, bfloat16 or float32", "")
    BLOCKSIZE = ("a blocksize is not a power of two that bitsandbytes uses", "")
    LAYOUT = ("a field of the quant_state has another type or dtype than bitsandbytes gives it", "")
    SIZES = (
        "the packed bytes, the absmax and the shape disagree (a shard, or a damaged state)",
        "gather the weight before it is used (FSDP2: do not touch a sharded parameter)",
    )
    NOT_CONTIGUOUS = ("a tensor of the weight is not contiguous", "call .contiguous() on it")
    DEVICES = ("the tensors of the weight are on different devices", "move weight and quant_state together")
    OUT = ("out has another shape, dtype, device, layout or alignment than the result", "")
    MISALIGNED = ("the packed weight does not start on 4 bytes", "")
    NO_MEMORY = (
        "a tensor of the weight has no memory (freed, offloaded or sharded away)",
        "bring the weight back to the GPU before it is used",
    )
    CAPTURING = (
        "the first use fell inside a CUDA graph capture, where nothing can be compiled",
        "run one step before capturing",
    )
    KERNEL_FAILED = ("the kernel could not be compiled or checked on this GPU", "see the error in `nf4-patch doctor`")
    DEFERRED = ("the library's own fused kernel serves this call as fast (NF4_PATCH_DEFER)", "")
    ROWS = ("this GPU, shape and number of rows is not one where the fused product is measured to win", "")
    PRODUCT = ("x, bias or the weight is not what the fused product takes (dtype, blocksize, K, alignment)", "")
    ERROR = ("an error inside nf4_patch", "please report it with the traceback in the log")

    def __init__(self, sentence: str, advice: str):
        self.sentence = sentence
        self.advice = advice

    @property
    def is_expected(self) -> bool:
        """Nothing was missed: no warning, and nothing raised in strict mode."""
        return self in (Reason.NOT_4BIT, Reason.DEFERRED, Reason.ROWS, Reason.PRODUCT, Reason.MODE, Reason.EXPORT)


class Uncached(enum.Enum):
    """Why a weight that a caller only reads was decoded and not kept."""

    FULL = "the budget is spent, and no held weight has this size"
    CAPTURING = "a CUDA graph is being captured: its replays would read memory that the cache may free"
    STREAM = "it was decoded on another CUDA stream"
    INFERENCE = "a tensor of the weight is an inference tensor, which has no version counter"
    REFILLED = "its memory is freed and filled again under the same tensor (FSDP)"
    ZERO3 = "DeepSpeed ZeRO-3 owns it and writes it without a new version"
    STORAGE = "this PyTorch does not keep the Python object of a storage"
