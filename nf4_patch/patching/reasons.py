"""Every "no" has a name: why a call ran the original."""

from __future__ import annotations

import enum
from typing import final


@final
class Reason(enum.Enum):
    """Why a call ran the original: a sentence, and advice where there is something to do."""

    NOT_4BIT = "the weight has no bitsandbytes 4-bit state (unquantized, fp8, NVFP4, int4 or a list state)"
    NOT_CUDA = ("the packed weight is not on a CUDA GPU", "move the model to the GPU")
    ROCM = "this PyTorch is built for ROCm; the kernel is NVIDIA PTX"
    GPU_TOO_OLD = "the GPU is older than compute capability 7.5 (Tesla T4)"
    FUNCTORCH_TRANSFORM = "a functorch transform (vmap, grad, ...) is active"
    DISPATCH_MODE = "a torch dispatch mode is active, which could not see the fused matmul"
    FUNCTION_MODE = "a TorchFunctionMode is active, which sees the functions that the original calls"
    TENSOR_SUBCLASS = (
        "a tensor of the weight, or the input of a layer with LoRA, is a subclass with behaviour of its own "
        "(DTensor, FakeTensor, MetaTensor, ...)"
    )
    EXPORTING = "torch.export or torch.jit.trace is recording a program that must also run without nf4_patch"
    ARGUMENTS = "called without a weight or quant_state, or with an argument that differs from the quant_state"
    CPU_PACKING = (
        "the weight is in bitsandbytes' CPU packing, which no function dequantizes",
        "load the model again; with double quantization, model.cuda() converts the weight back, and model.to('cuda') does not",
    )
    QUANT_TYPE = "quant_type is neither nf4 nor fp4"
    OUTPUT_DTYPE = ("the output dtype is not float16, bfloat16 or float32", "set bnb_4bit_compute_dtype to one of them")
    STORAGE_DTYPE = "quant_storage is not uint8, float16, bfloat16 or float32"
    BLOCKSIZE = "the blocksize is not one of bitsandbytes': 32 to 4096, a power of two"
    STATE_FIELDS = "a field of the quant_state does not have the type or dtype that bitsandbytes gives it"
    SIZE_MISMATCH = (
        "the packed bytes, the absmax and the shape do not fit together (a shard, or a damaged state)",
        "gather the weight before it is used (FSDP2: do not touch a sharded parameter)",
    )
    NOT_CONTIGUOUS = (
        "a tensor of the weight is not contiguous, or a negative or conjugate view",
        "call .contiguous() or .resolve_neg() on it",
    )
    MIXED_DEVICES = ("the tensors of the weight are on different devices", "move weight and quant_state together")
    OUT_MISMATCH = (
        "out does not have the shape, dtype, device, layout or alignment of the result, or shares an input's memory"
    )
    REQUIRES_GRAD = ("the packed weight requires a gradient", "freeze it: weight.requires_grad_(False)")
    MISALIGNED = "the packed weight does not start on 4 bytes"
    NO_STORAGE = (
        "the memory of one of the weight's tensors is freed (offloaded or sharded away)",
        "bring the weight back to the GPU before it is used",
    )
    GRAPH_CAPTURE = (
        "the first use was inside a CUDA graph capture, where no kernel can be compiled",
        "run one step before capturing",
    )
    KERNEL_FAILED = ("the kernel could not be compiled or checked on this GPU", "see the error in `nf4-patch doctor`")
    DEFERRED = "the library's own fused kernel runs this call: no benchmark shows ours faster here"
    NOT_FASTER = (
        "no benchmark shows the fused matmul faster for this GPU, shape and row count",
        "run `nf4-patch calibrate` once on this GPU",
    )
    MATMUL_OPERANDS = "the fused matmul does not support this dtype, K, alignment, bias or gradient"
    EXPERTS_NOT_PACKED = (
        "the experts are in 16 bits: load_in_4bit does not pack them",
        'pack them while they are loaded, with enable(experts="4bit"): see docs/mixtures-of-experts.md',
    )
    SECOND_PARAMETRIZATION = "another parametrization changes the dequantized experts (LoRA on the experts' weights)"
    HOOKED = "a hook, or parametrize.cached(), takes part in reading the packed experts"
    BATCHED_MM_GRADIENT = ("the experts' implementation batched_mm saves copies of weights", "use grouped_mm to train")
    EXPERT_PARALLEL = "the experts of a layer are spread over several processes"
    EXPERT_BLOCKS = "an expert does not end where a quantization block ends: all experts are dequantized"
    LORA_INACTIVE = "the layer's adapters are disabled, merged, or chosen for each row (adapter_names)"
    LORA_VARIANT = "the adapter is a variant of LoRA (DoRA, aLoRA, ...) or has a bias"
    LORA_HOOKED = (
        "a subclass, a hook or a parametrization takes part in the layer, its base layer, lora_A, lora_B or dropout",
        "DeepSpeed ZeRO-3 hooks every module: DDP and FSDP2 do not",
    )
    LORA_DTYPES = (
        "input, adapter and the base's product are not in one precision (activations in fp32 without autocast, for example)",
        "train under autocast (fp16=True or bf16=True of a Trainer), or without prepare_model_for_kbit_training, "
        "which casts norms to fp32; keep adapters in fp32 or in the input's dtype",
    )
    LORA_OPERANDS = (
        "the fused matmul adds one adapter in bf16 or fp32, with inputs in bf16, a rank that 4 divides and no dropout",
        "use one adapter and a rank of 8, 16, 32 or 64, and generate in evaluation mode",
    )
    GRAPH_NEW_SHAPE = "a decoder layer was not called often enough with inputs of this shape to be captured"
    GRAPH_NOT_CHECKPOINTED = (
        "a layer without gradient checkpointing, in evaluation or without gradients",
        "train with gradient_checkpointing=True",
    )
    GRAPH_CHECKPOINT = "the layer's checkpoint is not PyTorch's own, or has a context_fn or other options"
    GRAPH_ARGUMENTS = "an argument or the result of the layer is not what a CUDA graph can take"
    GRAPH_HOOKED = (
        "a hook, packed experts, a device_map or torch.compile takes part in the layer, or inner outputs are recorded"
    )
    GRAPH_MODE = 'anomaly detection, another capture, an outer checkpoint or offload="..." is active'
    GRAPH_SHARDED = "the layer's parameters are sharded (FSDP, ZeRO-3)"
    GRAPH_CHANGED = "the layer changed after it was captured: it will be captured again"
    GRAPH_STREAM = "the layer was called on another CUDA stream than its graphs"
    GRAPH_SYNCHRONIZES = "an operation in the layer waits for the GPU, which a CUDA graph cannot do"
    GRAPH_RANDOM = "the layer draws random numbers on the host, which a CUDA graph would repeat"
    GRAPH_STATE = "the layer changes its own state, or keeps a tensor from its forward to its backward"
    GRAPH_MEMORY = "there was not enough memory to capture the layers"
    GRAPH_FAILED = "the layer could not be captured"
    INTERNAL_ERROR = ("an error inside nf4_patch", "please report it with the traceback in the log")

    def __init__(self, sentence: str, advice: str = ""):
        self.sentence = sentence
        self.advice = advice

    @property
    def is_expected(self) -> bool:
        """Nothing was missed: no warning, and nothing raised in strict mode."""
        return self in EXPECTED


# For these the original computes wrong numbers too: a call that dequantizes raises an error.
WRONG_IN_THE_ORIGINAL = {Reason.CPU_PACKING}
EXPECTED = {
    Reason.NOT_4BIT, Reason.DEFERRED, Reason.NOT_FASTER, Reason.MATMUL_OPERANDS, Reason.DISPATCH_MODE, Reason.EXPORTING,
    Reason.EXPERTS_NOT_PACKED, Reason.SECOND_PARAMETRIZATION, Reason.HOOKED,
    Reason.BATCHED_MM_GRADIENT, Reason.EXPERT_PARALLEL, Reason.EXPERT_BLOCKS,
    *(reason for reason in Reason if reason.name.startswith("GRAPH_") and reason.name != "GRAPH_CAPTURE"),
    Reason.LORA_INACTIVE, Reason.LORA_VARIANT, Reason.LORA_HOOKED, Reason.LORA_DTYPES, Reason.LORA_OPERANDS,
}  # fmt: skip
