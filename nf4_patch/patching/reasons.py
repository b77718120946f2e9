"""The reasons for a fallback to the original function."""

from __future__ import annotations

import enum
from typing import final


@final
class Reason(enum.Enum):
    """The reason why a call ran the original function. Each Reason has a sentence, and advice if the user can change something."""

    NOT_4BIT = "the weight has no bitsandbytes 4-bit quant_state (it is unquantized, fp8, NVFP4 or int4, or its state is a list)"
    NOT_CUDA = (
        "the packed weight is not on a CUDA GPU",
        "move the model to an NVIDIA GPU; PyTorch must be built with CUDA",
    )
    ROCM = "this PyTorch is built for ROCm, and the kernel runs on NVIDIA GPUs only"
    GPU_TOO_OLD = "the GPU is older than compute capability 7.5 (Tesla T4)"
    FUNCTORCH_TRANSFORM = "a functorch transform (vmap, grad, ...) is active, or a backward with is_grads_batched"
    DISPATCH_MODE = "a TorchDispatchMode is active, and the kernel would hide the original's operators from it"
    FUNCTION_MODE = "a TorchFunctionMode is active, and the kernel would hide the original's functions from it"
    TENSOR_SUBCLASS = (
        "a tensor of the weight, or the input of a layer with LoRA, is a tensor subclass with its own dispatch "
        "(DTensor, FakeTensor, MetaTensor, ...)"
    )
    EXPORTING = "torch.export or torch.jit.trace is recording a program that must also run without nf4_patch"
    ARGUMENTS = "the call has no weight or quant_state, or an argument contradicts the quant_state"
    CPU_PACKING = (
        "the weight is in bitsandbytes' packing for the CPU, which no function can dequantize",
        "load the model again. With double quantization, model.cuda() converts the weight back, but model.to('cuda') does not",
    )
    QUANT_TYPE = "quant_type is neither nf4 nor fp4"
    OUTPUT_DTYPE = ("the output dtype is not float16, bfloat16 or float32", "set bnb_4bit_compute_dtype to one of them")
    STORAGE_DTYPE = "quant_storage is not uint8, float16, bfloat16 or float32"
    BLOCKSIZE = "the blocksize is not a power of two from 32 to 4096"
    STATE_FIELDS = "a field of the quant_state has another type or dtype than in bitsandbytes"
    SIZE_MISMATCH = (
        "the packed bytes, the absmax and the shape do not match (a shard, or a damaged quant_state)",
        "gather the weight before it is used (with FSDP2, do not read a sharded parameter)",
    )
    NOT_CONTIGUOUS = (
        "a tensor of the weight is not contiguous, or is a negative or conjugate view",
        "call .contiguous() or .resolve_neg() on the tensor",
    )
    MIXED_DEVICES = (
        "the tensors of the weight are on different devices",
        "move the weight and its quant_state together",
    )
    OUT_MISMATCH = "the argument out has another shape, dtype, device, layout or alignment than the result, or shares memory with an input"
    REQUIRES_GRAD = ("the packed weight requires a gradient", "freeze the weight with weight.requires_grad_(False)")
    MISALIGNED = "the address of the packed weight is not a multiple of 4"
    NO_STORAGE = (
        "the memory of a tensor of the weight is freed (offloaded or sharded)",
        "move the weight back to the GPU before it is used",
    )
    GRAPH_CAPTURE = (
        "the first use was inside a CUDA graph capture, where no kernel can be compiled",
        "run one step before the capture",
    )
    KERNEL_FAILED = ("the kernel could not be compiled or verified on this GPU", "see the error in `nf4-patch doctor`")
    DEFERRED = "the library's own fused kernel runs, because no benchmark shows nf4_patch faster for this call"
    NOT_FASTER = "no benchmark or measurement shows the fused matmul faster for this GPU, shape and row count"
    MATMUL_OPERANDS = (
        "the fused matmul does not support this dtype, number of input features, alignment, bias or gradient"
    )
    EXPERTS_NOT_PACKED = (
        "the experts are in 16 bits, because load_in_4bit alone does not pack them",
        'call enable(experts="4bit") before the model is loaded, see docs/mixtures-of-experts.md',
    )
    SECOND_PARAMETRIZATION = (
        "a second parametrization changes the dequantized experts (LoRA on the experts' weights, for example)"
    )
    HOOKED = "a hook or parametrize.cached() is active while the packed experts are read"
    BATCHED_MM_GRADIENT = (
        "the experts implementation batched_mm saves copies of the dense weights for the backward",
        "train with grouped_mm",
    )
    EXPERT_PARALLEL = "the experts of a layer are distributed over several processes"
    EXPERT_BLOCKS = "a quantization block spans two experts, so all experts are dequantized"
    REPLACED = (
        "another library or the script replaced this function, or one that it calls, before enable(), so their code runs",
        "call enable() before the function is replaced, or remove the other function, which the log names",
    )
    MERGE_CHANGED = (
        "layers share the weight, other code changed it, or the option was off in the merge, so peft quantizes the weight again",
        "switch the option on before the merge",
    )
    LORA_INACTIVE = "the layer's adapters are disabled, merged, or selected per row (adapter_names)"
    LORA_VARIANT = "the adapter is a variant of LoRA (DoRA, aLoRA, ...), or has a bias or a tensor as its scaling"
    LORA_HOOKED = (
        "the layer, its base layer, lora_A, lora_B or dropout is a subclass, or has a hook or parametrization",
        "train with DDP or FSDP2 instead of DeepSpeed ZeRO-3, which hooks every module",
    )
    LORA_REPLACED = (
        "another library or the script replaced or wrapped a function that fused LoRA would compute itself "
        "(a forward of peft, bitsandbytes or torch.nn.Linear, matmul_4bit, dequantize_4bit), so their code runs",
        "remove the other function, which the log names, to use the option",
    )
    LORA_DTYPES = (
        "the dtypes of the input, the adapter and the base layer cannot be combined (fp32 activations without autocast, for example)",
        "train under autocast (Trainer: fp16=True or bf16=True), or without prepare_model_for_kbit_training, "
        "which casts norms to fp32. Keep adapters in fp32 or in the input's dtype",
    )
    LORA_OPERANDS = (
        "the fused matmul adds only one adapter in bf16 or fp32, with inputs in bf16, a rank that is a multiple of 4, and no dropout",
        "use one adapter and a rank of 8, 16, 32 or 64, and generate in evaluation mode",
    )
    GRAPH_NEW_SHAPE = (
        "the decoder layer has not been called often enough with inputs of this shape to be captured",
        "give batches few lengths, with pad_to_multiple_of=64",
    )
    GRAPH_NOT_CHECKPOINTED = (
        "the decoder layer trains without gradient checkpointing",
        'train with gradient_checkpointing=True, or enable(activations="auto")',
    )
    GRAPH_NOT_TRAINING = (
        "the decoder layer runs in evaluation mode or without gradients, and without a static cache",
        'generate with cache_implementation="static"',
    )
    GRAPH_SLOW_GPU = (
        '"fast" captures no graphs on GPUs older than compute capability 8.0, because such GPUs do not wait for Python',
        'call enable("fast", graphs="auto") to capture graphs there',
    )
    GRAPH_CHECKPOINT = (
        "the decoder layer's checkpoint is neither PyTorch's nor Unsloth's, has a context_fn or other options, or would round"
        " the layer's fp32 input to bf16, as Unsloth's does",
        "train with gradient_checkpointing=True, as transformers and TRL set it",
    )
    GRAPH_ARGUMENTS = (
        "a CUDA graph does not support an argument or the result of the decoder layer",
        "if the argument is a cache, train with model.config.use_cache = False",
    )
    GRAPH_HOOKED = (
        "the decoder layer has hooks (a device_map over several GPUs sets some), compiled modules or sharded parameters (FSDP, ZeRO-3), or its"
        " outputs are recorded",
        'with one GPU, pass device_map={"": 0}',
    )
    GRAPH_OWN_CODE = (
        "the decoder layer runs code of the script or notebook, which might read values that change, but a replay runs no Python",
        "put the code into an installed package, for example with `pip install -e .`, or train without graphs",
    )
    GRAPH_REUSED = (
        "the decoder layer shares a trained parameter with another layer or with itself, or is called twice before its backward"
        " under a reentrant checkpoint, and a CUDA graph would add up the gradients in another order",
        "give each layer its own adapter, and set use_reentrant=False",
    )
    GRAPH_MODE = (
        'anomaly detection, a profiler, another capture, an outer checkpoint or offload="..." is active, or the layer runs on'
        " another CUDA stream than its graphs",
        "end the mode or the profiler",
    )
    GRAPH_CHANGED = (
        "the decoder layer changed after its capture and will be captured again",
        "change layers before the training, not at every step",
    )
    GRAPH_BACKWARD = (
        "the backward of the decoder layer runs inside autocast, under create_graph=True, on another CUDA stream, in a mode or"
        " transform, or with other settings than the forward, or the layer or its graphs changed after the forward",
        "call loss.backward() after the autocast block",
    )
    GRAPH_STATE = (
        "the decoder layer changes its own state or its arguments, or keeps a tensor from its forward to its backward",
        'pass graphs="off" for this model',
    )
    GRAPH_MEMORY = (
        "the GPU does not have enough memory for the graphs, the rest of a step and a margin",
        "use smaller batches",
    )
    GRAPH_FAILED = (
        "the decoder layer cannot be captured: an operation waits for the GPU, draws random numbers on the host or fails in the capture",
        "replace the operation in the line of code that the log names",
    )
    GRAPH_THREADS = (
        "another thread of the process might use the GPU, or draws random numbers on the host, while a layer would be captured",
        "use the GPU in one thread only, and put the functions of other threads into installed modules that do not import torch",
    )
    ACTIVATIONS_WAITING = (
        'activations="auto" observes two training steps, the layer\'s memory is not measured yet, or CUDA graphs soon replace calls of this'
        " length"
    )
    ACTIVATIONS_BUDGET = (
        "the memory that training leaves free, or the given size, has no room for the decoder layer's activations"
    )
    ACTIVATIONS_CHECKPOINT = (
        "the decoder layer's checkpoint is neither PyTorch's nor Unsloth's, has a context_fn, preserve_rng_state=False or other"
        " options, or would round the layer's fp32 input to bf16, as Unsloth's does",
        "train with gradient_checkpointing=True, as transformers and TRL set it",
    )
    ACTIVATIONS_HOOKED = (
        "hooks on saved tensors, an outer checkpoint, a CUDA graph capture, a mode or a transform is active, or PyTorch is older than 2.8",
        "train without activation_offloading=True, which moves kept activations to host memory",
    )
    ACTIVATIONS_LAYER = "the decoder layer's parameters are sharded (FSDP, ZeRO-3), or its forward changes its buffers or returns an unknown object"
    ACTIVATIONS_REENTRANT = (
        "a reentrant checkpoint would compute something different, because the layer is used twice before a backward, shares parameters"
        " with another layer, or gets few rows, a list, a dict, or no input with a gradient",
        'train with gradient_checkpointing_kwargs={"use_reentrant": False}',
    )
    INTERNAL_ERROR = ("nf4_patch raised an error", "please report it with the traceback from the log")

    def __init__(self, sentence: str, advice: str = ""):
        self.sentence = sentence
        self.advice = advice

    @property
    def is_expected(self) -> bool:
        """Return whether the fallback is normal, so that it causes no warning, and no error in strict mode."""
        return self in EXPECTED


# For these Reasons, replacements that dequantize raise an error instead of falling back, because the original would
# compute wrong numbers.
WRONG_IN_THE_ORIGINAL = {Reason.CPU_PACKING}
EXPECTED = {
    Reason.NOT_4BIT, Reason.DEFERRED, Reason.NOT_FASTER, Reason.MATMUL_OPERANDS, Reason.DISPATCH_MODE, Reason.EXPORTING,
    Reason.REPLACED, Reason.EXPERTS_NOT_PACKED, Reason.SECOND_PARAMETRIZATION, Reason.HOOKED,
    Reason.BATCHED_MM_GRADIENT, Reason.EXPERT_PARALLEL, Reason.EXPERT_BLOCKS,
    *(reason for reason in Reason if reason.name.startswith(("GRAPH_", "ACTIVATIONS_")) and reason.name != "GRAPH_CAPTURE"),
    Reason.LORA_INACTIVE, Reason.LORA_VARIANT, Reason.LORA_HOOKED, Reason.LORA_REPLACED, Reason.LORA_DTYPES, Reason.LORA_OPERANDS,
}  # fmt: skip
# Reasons for calls that an option is not meant for, such as an evaluation, or handles only in part.
NOT_MEANT = {
    Reason.NOT_4BIT, Reason.DEFERRED, Reason.NOT_FASTER, Reason.MATMUL_OPERANDS, Reason.DISPATCH_MODE, Reason.EXPORTING,
    Reason.LORA_INACTIVE, Reason.LORA_OPERANDS, Reason.GRAPH_NOT_TRAINING, Reason.HOOKED, Reason.EXPERT_BLOCKS,
    Reason.SECOND_PARAMETRIZATION, Reason.ACTIVATIONS_BUDGET,
}  # fmt: skip
# Reasons that might not apply to the next call of the same layer. An option with many such fallbacks still helps little.
TEMPORARY = {
    Reason.ACTIVATIONS_WAITING,
    Reason.GRAPH_NEW_SHAPE,
    Reason.GRAPH_CHANGED,
    Reason.GRAPH_BACKWARD,
}
