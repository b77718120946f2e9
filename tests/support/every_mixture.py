"""Every mixture of experts of the installed transformers, as small as possible, and the actions that work with it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import pkgutil
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.nn.utils import parametrize
from transformers import BitsAndBytesConfig

import nf4_patch
from nf4_patch.libraries.transformers import loading
from nf4_patch.libraries.transformers.loading import is_matrix, packed_stacks

LOADING = loading.__name__.rpartition(".")[2]

HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForImageTextToText", "ForTokenClassification", "Model")
PARTS = {  # of a model that is several
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel", "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}  # fmt: skip
LAYERS = 2
TOLERANCE = 1e-4  # of a gradient in fp32, in its norm
# What a configuration says, by the name of the attribute. Names that it lacks are passed over.
SMALL: dict[str, Any] = {
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "use_cache": False,
    **dict.fromkeys(("hidden_size", "d_model", "emb_dim", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "shared_expert_intermediate_size", "ffn_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "depth", "n_layer"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "num_limited_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    "head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size", "chunk_size"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"), 8),
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def kind_of(name: str) -> Any:
    """Return the class of a model with experts in this folder of transformers, or None if there is none.

    Prefer a class with a head.
    """
    spec = importlib.util.find_spec(f"transformers.models.{name}.modeling_{name}")
    if spec is None or "Expert" not in Path(spec.origin).read_text():
        return None
    module = importlib.import_module(spec.name)
    own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    if not any(issubclass(each, torch.nn.Module) and "Expert" in each.__name__ for each in own):
        return None
    models = [each for each in own if issubclass(each, transformers.PreTrainedModel) and each.config_class]
    heads = (PARTS[name],) if name in PARTS else HEADS
    return next(each for head in heads for each in models if each.__name__.endswith(head))


def mixtures() -> dict[str, Any]:
    """Return the class of a model of every mixture, by folder."""
    folders = (found.name for found in pkgutil.iter_modules(transformers.models.__path__) if found.ispkg)
    return {name: kind for name in folders if (kind := kind_of(name)) is not None}


# What the class needs besides, by path.
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["sparse"] * LAYERS, "text_config.num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {
        "text_config.moe_intermediate_size": [64, 64], "text_config.rope_parameters.mrope_section": [3, 3, 2],
    },
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "glm5_next": {"text_config.qk_rope_head_dim": 0},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl": {"text_config.rope_parameters.mrope_section": [4, 2, 2]},
    "inkling2": {"unpadded_vocab_size": 96},
    "inkling2_loop": {"unpadded_vocab_size": 96},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 32, "zero_expert_num": 2},
    "mimo_v2_flash": {"head_dim": 32, "num_key_value_heads": 2},
    "mistral4": {"qk_rope_head_dim": 8},
    "mistral_large4": {"text_config.kv_source_layers": [0, 1]},
    "muse_spark": {"audio_config.out_hidden_size": 64, "audio_config.patch_sizes": (4, 2),
                   "audio_config.hidden_sizes": (64, 64), "audio_config.depths": (1, 1)},
    "qwen4_exp": {"layer_types": ["linear_attention"] * LAYERS},
    "step3p7": {"vision_config.intermediate_size": 373, "text_config.sliding_window": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# What is split into linear layers when it is read: transformers packs all of them or fails.
SPLIT = {"lara_mini": [".*linear_attn"], "unlimited_ocr": [".*vision"]}
# Layers that differ: these configurations are made of SMALL, and not changed.
MADE = {
    "gemma4": {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * LAYERS},
    "diffusion_gemma": {"layer_types": ["full_attention"] * LAYERS},
    "dots3_note": {},
}


def shrink(config: Any, small: dict[str, Any]) -> Any:
    """Shrink the configuration and the configurations inside it to the values of ``small``, where they differ."""
    for name, value in small.items():
        if getattr(config, name, None) is not None:
            with contextlib.suppress(StrictDataclassFieldValidationError):
                setattr(config, name, value)
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value, small)
        elif isinstance(value, list) and name.endswith("layer_types"):
            setattr(config, name, value[-LAYERS:])
    return config


def config_of(name: str, model: Any) -> Any:
    if name in MADE:
        return model.config_class(**SMALL | MADE[name])
    config = shrink(model.config_class(), SMALL)
    for path, value in OWN.get(name, {}).items():
        *parts, last = path.split(".")
        part = functools.reduce(getattr, parts, config)
        part.update({last: value}) if isinstance(part, dict) else setattr(part, last, value)
    return config


def random_model(name: str, model: Any) -> Any:
    torch.manual_seed(0)
    made = model(config_of(name, model)).to(torch.bfloat16)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made.train()


def matrices(model: Any) -> dict[str, str]:
    """Return the class and the name of each matrix in the experts that is no separate linear layer, by full name."""
    return {
        f"{path}.{name}": f"{type(module).__name__}.{name}"
        for path, module in model.named_modules()
        if "Expert" in type(module).__name__
        for name, parameter in module._parameters.items()
        if is_matrix(name, parameter)
    }


def unpacked(model: Any) -> Any:
    """Replace packed experts by dense experts with the decoded values. Linear layers stay in 4 bits."""
    for _, module, name in packed_stacks(model):
        dense = getattr(module, name).detach()
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        setattr(module, name, torch.nn.Parameter(dense))
    return model


def loss_of(model: Any) -> torch.Tensor:
    result = model(input_ids=torch.arange(24).view(2, 12) * 5 % 90 + 3)
    found = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return found.float().square().mean()


@contextlib.contextmanager
def said_by_us() -> Iterator[list[str]]:
    """Yield the warnings that nf4_patch's loading logs."""
    said: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), loading.logger
    handler.emit = lambda record: said.append(record.getMessage()) if record.module == LOADING else None  # type: ignore
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


class No(Exception):
    """An action does not work. The message says why."""


class Walk:
    """Actions on one mixture, with one method for each column of the table. A method raises No if its action does not work."""

    def __init__(self, name: str, kind: Any, folder: Path):
        self.kind, self.folder, self.experts = kind, folder, "4bit"
        model = random_model(name, kind)
        self.matrices = matrices(model)
        linears = {path: each for path, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
        small = [
            path for path, each in linears.items() if min(each.weight.shape) < 64
        ]  # bitsandbytes has none on a CPU
        self.skipped = ["lm_head", *small, *SPLIT.get(name, ())]
        model.save_pretrained(folder / "dense")
        self.keys = keys_in(folder / "dense")

    def loaded(self, folder: str = "dense", dtype: torch.dtype = torch.bfloat16) -> Any:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=self.skipped,
        )  # fmt: skip
        options = {"quantization_config": config} if folder == "dense" else {}
        return self.kind.from_pretrained(self.folder / folder, dtype=dtype, **options).train()

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Turn the option off inside the ``with`` block."""
        self.experts = "off"
        with nf4_patch.enabled(experts="off"):
            yield
        self.experts = "4bit"

    def packed(self) -> None:
        """Check that every stack is packed, or that a warning names the stacks that are not."""
        with said_by_us() as said:
            model = self.loaded()
        found = {name for name, _, _ in packed_stacks(model)}
        left = {name: kind for name, kind in self.matrices.items() if name not in found}
        names = ", ".join(sorted(set(left.values())))
        assert [
            f"{len(left)} weights of experts stay in 16 bits" in each and f": {names}." in each for each in said
        ] == ([True] if left else [])
        if left:
            raise No(f"in 16 bits: {names}")

    def saved(self) -> Any:
        model, folder = self.loaded(), self.folder / self.experts
        model.save_pretrained(folder)
        return model

    def reload(self) -> None:
        model = self.saved()
        assert torch.equal(loss_of(self.loaded(self.experts)), loss_of(model))

    def with_lora(self, model: Any, **options: Any) -> Any:
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options))

    def step(self, model: Any, **options: Any) -> dict[str, torch.Tensor]:
        """Return the loss of the second step, in which peft failed once, and the gradient of each LoRA factor.

        A missing gradient is zero.
        """
        model = self.with_lora(model, **options)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(2)
            loss = loss_of(model)
            loss.backward()
        lora = {name: each for name, each in model.named_parameters() if "lora_" in name}
        return {"loss": loss.detach()} | {
            name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in lora.items()
        }

    def trains(self, **options: Any) -> None:
        """Check that training equals that of dense experts without the option: the same modules, loss and gradients, in fp32."""
        dense = unpacked(self.loaded(dtype=torch.float32))
        ours = self.step(self.loaded(dtype=torch.float32), **options)
        with self.without():
            stock = self.step(dense, **options)
        assert list(ours) == list(stock), "LoRA is on other modules"
        off = [name for name in ours if not (ours[name] - stock[name]).norm() <= TOLERANCE * stock[name].norm()]
        if off:
            raise No(f"{len(off)} of the loss and {len(ours) - 1} gradients are off, as {off[0]}")

    def tutorial(self) -> None:
        self.trains(target_modules=TUTORIAL)

    def on_stacks(self) -> dict[str, Any]:
        stacks = {".".join(name.split(".")[-2:]) for name in self.matrices}
        return {"target_modules": [], "target_parameters": sorted(stacks)}

    def parameters(self) -> None:
        self.trains(**self.on_stacks())

    def merge(self) -> None:
        """Check that the merged weight is the sum of both, except for the error of 4 bits."""
        model = self.with_lora(self.loaded(), lora_alpha=256, **self.on_stacks())
        wrappers = [each for each in model.modules() if isinstance(each, ParamWrapper)]
        delta = {each: each.get_delta_weight("default").float() for each in wrappers}
        before = {each: getattr(each.get_base_layer(), each.parameter_name).float() for each in wrappers}
        model.merge_adapter()
        for each in wrappers:
            merged = getattr(each.get_base_layer(), each.parameter_name).float()
            error = (merged - before[each] - delta[each]).norm() / delta[each].norm()
            if not error < 0.25:
                raise No(f"what is merged is off by {error:.2g}")

    def export(self) -> None:
        self.saved()
        for folder in ("dense", self.experts):
            model = self.loaded(folder).dequantize(torch.bfloat16)
            shutil.rmtree(self.folder / "export", ignore_errors=True)
            model.save_pretrained(self.folder / "export")
            assert keys_in(self.folder / "export") == self.keys, "other names"


COLUMNS = ("packed", "reload", "tutorial", "parameters", "merge", "export")
TUTORIAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def keys_in(folder: Path) -> set[str]:
    return {key for file in folder.glob("*.safetensors") for key in safetensors.torch.load_file(file)}


def why_not(walk: Walk, column: str) -> str:
    """Return why a column's action does not work, or ""."""
    try:
        getattr(walk, column)()
    except Exception as error:
        if isinstance(error, No):
            return str(error)
        said = re.split(r"[:(\n]", str(error).replace(str(walk.folder), ""))[0]
        return f"{type(error).__name__}: {said}"
    return ""


def walked(name: str, kind: Any) -> dict[str, str]:
    """Return "yes" or the error for each column, or "-" if the action does not work without the option either.

    The result is empty if the mixture has no stacks.
    """
    with tempfile.TemporaryDirectory() as folder, nf4_patch.enabled(experts="4bit"):
        walk, found = Walk(name, kind, Path(folder)), {}
        for column in COLUMNS if walk.matrices else ():
            found[column] = why_not(walk, column) or "yes"
            if found[column] != "yes" and column != "packed":
                with walk.without():
                    if why_not(walk, column):
                        found[column] = "-"
        return found
