"""Unsloth's loader and LoRA functions with offload=: losses and adapters of the resident model, to the bit.

offload_unsloth.py FOLDER. CPU tensors stand in for CUDA, and the free memory is simulated. Unsloth's loader gives each layer
its LoRA functions. transformers' attention calls them here, because no CPU runs the kernels of Unsloth's attention.
"""

import gc
import shutil
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import unsloth  # before transformers, as Unsloth requires

import torch
from host_memory import Cuda
from offloaded import Training, all_in_host, counts, packed_of, same_steps, sizes_of
from tiny_experts import adapters_of
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from unsloth.kernels import fast_lora, utils
from unsloth.models import llama

import nf4_patch
from benchmarks.checkpoint import load_4bit, save_config
from benchmarks.models import LINEARS, Shape, config_of
from nf4_patch.libraries.unsloth import adapters
from nf4_patch.memory import spare as memory
from nf4_patch.nf4 import runtime
from nf4_patch.offload import host_memory, prefetch
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

LAYERS, CPU, MARGIN, GIB = 4, -1, 2**26, 2**30
DEQUANTIZE = "unsloth.kernels.utils._fast_dequantize_bnb"
folder, room = sys.argv[1], 0
save_config(folder, config_of(Shape(64, 128, LAYERS, 4, 2, vocab_size=96)), "cpu")


def info(device):
    taken = prefetch.taken[device]
    return memory.MemoryInfo(room + MARGIN - taken, GIB + taken, GIB, MARGIN)


memory.MemoryInfo.of, memory.SECONDS = info, 0
runtime.devices_in_use, runtime.empty_cache, runtime.allocation_retries = lambda: [CPU], lambda: None, lambda device: 0
# What Unsloth's loader asks of a GPU.
gpu = types.SimpleNamespace(name="", total_memory=GIB, major=9, minor=0, multi_processor_count=1)
vars(torch.cuda).update(
    get_device_properties=lambda *_: gpu, get_device_capability=lambda *_: (9, 0), current_device=lambda: 0,
    mem_get_info=lambda *_: (GIB, GIB),
)  # fmt: skip
llama.is_bfloat16_supported, llama.FastLlamaModel.pre_patch = lambda: True, staticmethod(lambda: None)


def swiglu_backward(dw, e, g):
    """The formula of Unsloth's kernel: h, and the factors of the gradients of ``up_proj`` and ``gate_proj``."""
    s = torch.sigmoid(e.float())
    f = (s * e.float()).to(dw.dtype)
    return f * g, dw * f, ((dw * g).float() * s * (1.0 + e.float() * (1.0 - s))).to(dw.dtype)


fast_lora.swiglu_fg_kernel = lambda e, g: torch.nn.functional.silu(e.float()).to(g.dtype) * g
fast_lora.swiglu_DWf_DW_dfg_kernel = swiglu_backward


def attention(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """As LlamaAttention.forward, with Unsloth's projections."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (x.view(shape).transpose(1, 2) for x in self.apply_qkv(self, hidden_states, inplace=False))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    result, weights = eager_attention_forward(self, q, k, v, attention_mask, self.scaling)
    return self.apply_o(self, result.reshape(*hidden_states.shape[:-1], -1)), weights


def model_of(offload, checkpointing=False, source=folder):
    gc.collect()
    host_memory.cuda = Cuda()
    prefetch.prefetchers.clear()
    nf4_patch.enable(offload=offload)
    model, _ = llama.FastLlamaModel.from_pretrained(
        source, max_seq_length=64, dtype=torch.bfloat16, load_in_4bit=True, device_map={"": "cpu"}, local_files_only=True,
        model_patcher=llama.FastLlamaModel,
    )  # fmt: skip
    model = llama.FastLlamaModel.get_peft_model(
        model, r=4, lora_alpha=4, lora_dropout=0, bias="none", use_gradient_checkpointing=checkpointing, random_state=0,
        target_modules=list(LINEARS), max_seq_length=64,
    )  # fmt: skip
    for layer in model.get_base_model().model.layers:
        layer.self_attn.forward = types.MethodType(attention, layer.self_attn)
        assert layer.self_attn.apply_qkv is fast_lora.apply_lora_qkv
        assert layer.mlp.forward.__func__ is fast_lora.apply_lora_mlp_swiglu
    return model


def result_of(training):
    return torch.stack(training.losses), [value.detach() for value in adapters_of(training.model).values()]


def freed():
    nf4_patch.disable()
    gc.collect()
    return not host_memory.blocks and not host_memory.cuda.pinned and not any(prefetch.taken.values())


def check(want, *where):
    training = Training(model_of(*where))
    offload = where[0]
    assert all_in_host(training.model) == (offload == "all") and len(packed_of(training.model)) == LAYERS * len(LINEARS)
    training.steps(2)
    before = counts()
    host_memory.cuda.copies.clear()
    training.steps(3)
    after = counts()
    assert same_steps(result_of(training), want) and want[0][0] != want[0][-1]
    assert after.late == before.late and after.fetches > before.fetches, (where, before, after)
    assert len(host_memory.cuda.copies) == after.fetches - before.fetches  # no weight is copied by itself
    del training
    assert freed()


for checkpointing in (False, True):
    training = Training(model_of("off", checkpointing))
    size = sizes_of(training.model)[0]
    training.steps(5)
    want = result_of(training)
    for offload in ("all", f"{3 * size}B"):
        check(want, offload, checkpointing)
packed = f"{folder}/packed"
shutil.copytree(folder, packed)
load_4bit(folder, "cpu").save_pretrained(packed)
check(want, "all", True, packed)
print("steps", flush=True)

# "auto": layers stay on the GPU from the third step on, and leave it before a batch with longer sequences or more rows.
SHAPES = [(2, 24)] * 4 + [(1, 48)] * 4 + [(2, 48)] * 4
found = []
for offload in ("off", "auto"):
    model, seen = model_of(offload), []
    room = 2 * max((block.size for block in host_memory.living()), default=0)
    hooked = model.get_base_model().model.layers[0].self_attn
    hooked.register_forward_hook(lambda *_, seen=seen: seen.append(prefetch.taken[CPU]))
    training = Training(model)
    for shape in SHAPES:
        ids = (torch.arange(shape[0] * shape[1]) * 7 % 96).view(shape)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.losses.append(loss.detach())
    found.append(result_of(training))
assert seen == [0, 0, 0, room] * 3 and counts().kept == 2, (seen, counts())
assert same_steps(*found)
del model, training, hooked, loss
assert freed()
print("auto", flush=True)

# On other GPUs than an H100 or H200, Unsloth's own kernel serves eager calls. It would read host memory.
utils._USE_NF4_KERNELS, adapters.keeps_eager_calls = True, lambda: True
counters.fallbacks.clear()
check(want, "all", True)
assert not counters.fallbacks[DEQUANTIZE, Reason.DEFERRED]
print("own kernel", flush=True)

# Compiled layers read host memory, and are traced whole. Older releases cannot be traced.
if not getattr(fast_lora, "TRACE_LORA_FUNCTIONS", False):
    sys.exit()
utils._USE_NF4_KERNELS = False
found = []
for offload, compiled in (("off", False), ("all", True)):
    layer = model_of(offload).get_base_model().model.layers[1]
    for project in (layer.self_attn.o_proj, layer.mlp.down_proj):
        project.lora_B.default.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()

    def block(x, layer=layer):
        q, k, v = fast_lora.apply_lora_qkv(layer.self_attn, x, inplace=False)
        return layer.mlp(fast_lora.apply_lora_o(layer.self_attn, q)) + torch.cat([k, v], -1)

    y = (torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block)(x)
    y.float().square().sum().backward()
    found.append([y, x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
assert all(map(torch.equal, *found)) and counts().fetches == 0
print("compiled", flush=True)
