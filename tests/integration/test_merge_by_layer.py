"""examples/merge_adapter.py merges layer by layer.

It writes the same files as the merge in memory, or refuses before anything is written.
"""

from __future__ import annotations

import functools
import gc
import json
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import safetensors.torch
import tiny_experts
import torch
import transformers
from run_example import EXAMPLES, completed
from tiny_experts import ARCHITECTURES, CONFIGS

import nf4_patch
from examples import layer_by_layer, offline

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has tests of its own")
ON = {"experts": "4bit"}
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
IN_4_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
load = functools.partial(
    transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16, device_map={"": "cpu"}
)


@pytest.fixture(autouse=True)
def switched_on(patched):
    patched.enable(**ON)


def llama(folder: Path, **changes) -> str:
    config = transformers.LlamaConfig(
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4} | changes
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def base_of(name: str, folder: Path) -> str:
    if name == "llama":
        return llama(folder)
    tiny_experts.random_model(name).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def options(**changes) -> dict:
    return {"quantization_config": transformers.BitsAndBytesConfig(**IN_4_BITS, **changes)}


def adapter_of(base: str, folder: Path, dtype=torch.bfloat16, **lora) -> str:
    """Save an adapter whose weights are all random."""
    model = load(base, dtype=dtype)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ATTENTION} | lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def in_memory(base: str, adapter: str, folder: Path, **options) -> Path:
    """Merge with the lines of docs/after-training.md."""
    model = load(base, **options).dequantize()
    model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(folder)
    offline.byte_tokenizer().save_pretrained(folder)
    return folder


def by_layer(base: str, adapter: str, folder: Path, **options) -> Path:
    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}, **options}
    layer_by_layer.merge(base, adapter, str(folder), lambda _: offline.byte_tokenizer(), **options)
    return folder


def merge_adapter(*arguments, monkeypatch) -> None:
    """Run examples/merge_adapter.py in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["merge_adapter.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / "merge_adapter.py"))


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def are_the_same(base: str, adapter: str, folder: Path, **options) -> dict[str, bytes]:
    want = content(in_memory(base, adapter, folder / "want", **options))
    found = content(by_layer(base, adapter, folder / "merged", **options))
    assert found.keys() == want.keys() and [name for name in want if found[name] != want[name]] == []
    assert not (folder / "merged.incomplete").exists()
    return found


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("name", "packed"),
    [*((name, False) for name in ("llama", *ARCHITECTURES)), *((name, True) for name in ("llama", *CONFIGS))],
)
def test_files_are_those_of_the_merge_in_memory(name, packed, tmp_path):
    """Compare weights, configs and tokenizer, from the original checkpoint and from a packed one.

    The names are those of the original.
    """
    base, four_bits = base_of(name, tmp_path / "base"), options()
    lora = {} if name == "llama" else EXPERTS | ({"target_modules": ["q_b_proj"]} if name == "deepseek-v3" else {})
    adapter = adapter_of(base, tmp_path / "adapter", **lora)
    original = tensors(tmp_path / "base")
    if packed:
        load(base, **four_bits).save_pretrained(tmp_path / "packed")
        base, four_bits = str(tmp_path / "packed"), {}
    are_the_same(base, adapter, tmp_path, **four_bits)
    merged = tensors(tmp_path / "merged")
    assert {key: each.shape for key, each in merged.items()} == {key: each.shape for key, each in original.items()}
    trained = [key for key in original if key.endswith(("q_proj.weight", "q_b_proj.weight", "experts.down_proj"))]
    assert trained and not any(torch.equal(merged[key], original[key]) for key in trained)


ADAPTERS = {
    "use_dora": {"use_dora": True},
    "use_rslora": {"use_rslora": True},
    "in fp32": {"dtype": torch.float32},
    "some layers": {"layers_to_transform": [1]},
    "ranks": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "modules_to_save": {"modules_to_save": ["lm_head", "input_layernorm"]},
    "tokens": {"trainable_token_indices": [1, 5]},
    "embeddings": {"target_modules": ["lm_head", "embed_tokens", "q_proj"]},
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_kind_of_adapter(name, tmp_path):
    base = llama(tmp_path / "base")
    are_the_same(base, adapter_of(base, tmp_path / "adapter", **ADAPTERS[name]), tmp_path, **options())


def test_bias(tmp_path):
    base = llama(tmp_path / "base", attention_bias=True)
    lora = {"bias": "all", "lora_bias": True}
    are_the_same(base, adapter_of(base, tmp_path / "adapter", **lora), tmp_path, **options())


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head"]}], ids=["tied", "untied by training"])
def test_tied_embeddings(lora, tmp_path):
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    are_the_same(base, adapter_of(base, tmp_path / "adapter", **lora), tmp_path, **options())
    assert ("lm_head.weight" in tensors(tmp_path / "merged")) == bool(lora)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_embeddings_that_stay_tied(name, tmp_path):
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = adapter_of(base, tmp_path / "adapter", modules_to_save=[name], ensure_weight_tying=True)
    are_the_same(base, adapter, tmp_path, **options())


def test_a_trained_router_with_a_buffer(tmp_path):
    base = base_of("deepseek-v3", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_b_proj"], modules_to_save=["gate"])
    edit_weights(tmp_path, lambda w: [w[key].add_(1) for key in w if "correction_bias" in key])
    are_the_same(base, adapter, tmp_path, **options())


def test_trained_modules_that_stay_in_fp32(tmp_path):
    """transformers keeps the norms of gpt-oss in fp32 if the model is loaded in fp16."""
    tiny_experts.random_model("gpt-oss").save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"], "dtype": torch.float32}
    are_the_same(base, adapter_of(base, tmp_path / "adapter", **lora), tmp_path, dtype=torch.float16, **options())
    assert tensors(tmp_path / "merged")["model.layers.0.input_layernorm.weight"].dtype is torch.float32


@pytest.mark.parametrize("exists", [True, False], ids=["to a folder", "to nothing"])
def test_a_link_as_the_output_folder(exists, trained, tmp_path):
    disk = tmp_path / "disk" / "merged"
    disk.parent.mkdir()
    if exists:
        disk.mkdir()
    (tmp_path / "link").symlink_to(disk)
    found = by_layer(str(trained / "base"), str(trained / "adapter"), tmp_path / "link", **options())
    want = by_layer(str(trained / "base"), str(trained / "adapter"), tmp_path / "merged", **options())
    assert content(found) == content(want) and not disk.is_symlink() and [*disk.parent.iterdir()] == [disk]


def test_experts_in_16_bits(tmp_path):
    base = base_of("qwen3", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", **EXPERTS)
    are_the_same(base, adapter, tmp_path, **options(llm_int8_skip_modules=["experts", "lm_head"]))


def test_a_4_bit_checkpoint_with_experts_in_16_bits(tmp_path):
    """transformers saves such a checkpoint without nf4_patch."""
    base = base_of("qwen3", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", **EXPERTS)
    with nf4_patch.enabled(experts="off"):
        load(base, **options()).save_pretrained(tmp_path / "stock")
    are_the_same(str(tmp_path / "stock"), adapter, tmp_path)


def test_gpt_oss_in_mxfp4(tmp_path, monkeypatch):
    """The script packs the decoded experts, as the training did, and writes them under their names in 16 bits."""
    tiny_experts.saved_in_mxfp4(tmp_path / "base")
    base, adapter = str(tmp_path / "base"), adapter_of(str(tmp_path / "base"), tmp_path / "adapter", **EXPERTS)
    load(base, **options()).save_pretrained(tmp_path / "packed")
    want = tensors(by_layer(str(tmp_path / "packed"), adapter, tmp_path / "want"))
    offline.byte_tokenizer().save_pretrained(base)
    merge_adapter("--model", base, "--adapter", adapter, "--out", tmp_path / "merged", monkeypatch=monkeypatch)
    merged = tensors(tmp_path / "merged")
    assert merged.keys() == want.keys() and all(torch.equal(merged[key], want[key]) for key in want)


def test_a_packed_checkpoint_keeps_its_own_4_bit_settings(tmp_path, monkeypatch, recwarn):
    """The script passes NF4 settings, which a checkpoint in FP4 ignores without a warning."""
    base = base_of("qwen3", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", **EXPERTS)
    fp4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    load(base, **{**options(), "quantization_config": fp4}).save_pretrained(tmp_path / "packed")
    offline.byte_tokenizer().save_pretrained(tmp_path / "packed")
    want = tensors(by_layer(str(tmp_path / "packed"), adapter, tmp_path / "want"))
    recwarn.clear()
    words = "--model", tmp_path / "packed", "--adapter", adapter, "--out", tmp_path / "merged"
    merge_adapter(*words, monkeypatch=monkeypatch)
    assert not [warning for warning in recwarn if "quantization_config" in str(warning.message)]
    merged = tensors(tmp_path / "merged")
    assert merged.keys() == want.keys() and all(torch.equal(merged[key], want[key]) for key in want)


def test_shards(tmp_path, monkeypatch):
    """The index names every weight once, and the loaded model equals the merge in memory."""
    base = base_of("qwen3", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", **EXPERTS)
    want = in_memory(base, adapter, tmp_path / "want", **options())
    monkeypatch.setattr(layer_by_layer, "SHARD", 1)
    found = by_layer(base, adapter, tmp_path / "merged", **options())
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(file.name for file in found.glob("*.safetensors")) == names
    index = json.loads((found / "model.safetensors.index.json").read_text())
    files = {name: safetensors.torch.load_file(found / name) for name in names}
    assert index["weight_map"] == {key: name for name, each in files.items() for key in each}
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors(want).values())
    merged, reference = load(str(found)).state_dict(), load(str(want)).state_dict()
    assert merged.keys() == reference.keys() and all(torch.equal(merged[key], reference[key]) for key in merged)


def test_no_layer_outlives_its_merge(tmp_path, monkeypatch):
    base = llama(tmp_path / "base", num_hidden_layers=6)
    adapter, live = adapter_of(base, tmp_path / "adapter"), []
    monkeypatch.setattr(layer_by_layer, "SHARD", 1)
    add = layer_by_layer.Shards.add

    def counted(self, weights):
        gc.collect()
        found = {
            each.data_ptr(): each.nbytes for each in gc.get_objects() if torch.is_tensor(each) and not each.is_meta
        }
        live.append(sum(found.values()))
        add(self, weights)

    monkeypatch.setattr(layer_by_layer.Shards, "add", counted)
    by_layer(base, adapter, tmp_path / "merged", **options())
    assert len(live) == 7 and len({*live[2:]}) == 1


# --- what is refused ---


def of_type(folder, config):
    model = peft.get_peft_model(load(llama(folder / "base")), config)
    model.save_pretrained(folder / "adapter")


def edit_config(folder, **changes):
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantize_config(folder, **config):
    file = folder / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def edit_weights(folder, change):
    file = folder / "adapter" / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(file)
    change(weights)
    safetensors.torch.save_file(weights, file)


def without_first_of_the_base(folder):
    file = folder / "base" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, file, {"format": "pt"})


def packed_without_a_state(folder):
    """Save the base in 4 bits, and delete all that belongs to the quantization of one weight."""
    load(str(folder / "base"), **options()).save_pretrained(folder / "packed")
    file = folder / "packed" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights = {key: each for key, each in weights.items() if "layers.1.mlp.up_proj.weight." not in key}
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    shutil.rmtree(folder / "base")
    (folder / "packed").rename(folder / "base")


def gpt2(folder):
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder / "base")


def tied_head(folder):
    base = llama(folder / "base", tie_word_embeddings=True)
    adapter_of(base, folder / "adapter", target_modules=["lm_head"])


def full(folder):
    layer_by_layer.shutil = SimpleNamespace(
        disk_usage=lambda _: SimpleNamespace(free=1000), rmtree=shutil.rmtree
    )  # taken back by the fixture of the test


def is_there(folder):
    (folder / "merged").mkdir()
    (folder / "merged" / "mine").touch()


REFUSED = {
    "no folder": (lambda f: shutil.rmtree(f / "adapter"), "is neither a folder nor an adapter on the Hub"),
    "no config": (lambda f: (f / "adapter/adapter_config.json").unlink(), "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter/adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "no model": (lambda f: shutil.rmtree(f / "base"), "base cannot be read: "),
    "no config of the model": (lambda f: (f / "base/config.json").unlink(), "base has no config.json. Pass the folder"),
    "a damaged config": (lambda f: (f / "base/config.json").write_text("{"), "base cannot be read: .*config.json"),
    "a damaged config of the adapter": (
        lambda f: (f / "adapter/adapter_config.json").write_text("{"), "adapter cannot be read: Expecting"
    ),
    "no weights of the model": (lambda f: (f / "base/model.safetensors").unlink(), "base cannot be read: .*no file named"),
    "a damaged file": (lambda f: (f / "base/model.safetensors").write_bytes(b"x"), "base/model.safetensors cannot be read"),
    "damaged weights": (
        lambda f: (f / "adapter/adapter_model.safetensors").write_bytes(b"x"), "adapter/adapter_model.safetensors cannot be read"
    ),
    "IA3": (lambda f: of_type(f, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])), "of the type .*IA3"),
    "pissa": (lambda f: edit_config(f, init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4'"),
    "replication": (lambda f: edit_config(f, layer_replication=[[0, 2], [1, 3]]), "layer_replication="),
    "aLoRA": (lambda f: edit_config(f, alora_invocation_tokens=[3]), r"alora_invocation_tokens=\[3\]"),
    "an unknown field": (lambda f: edit_config(f, use_newthing=True), "use_newthing=True, which this release of peft"),
    "no type": (lambda f: edit_config(f, peft_type=None), "of the type None"),
    "no quantization state": (packed_without_a_state, "lacks the quantization state of model.layers.1.mlp.up_proj.weight"),
    "Conv1D": (gpt2, "layers of the class Conv1D"),
    "an adapter beside the model": (
        lambda f: shutil.copy(f / "adapter/adapter_config.json", f / "base"), "base also holds an adapter"
    ),
    "a file": (lambda f: (f / "merged").touch(), "exists and is not empty"),
    "another size": (lambda f: llama(f / "base", hidden_size=128), "(?s)does not fit the model: .*size mismatch"),
    "fewer layers": (lambda f: llama(f / "base", num_hidden_layers=2), "no place for .*layers.2.self_attn.* and 3 more"),
    "a weight less": (
        lambda f: edit_weights(f, lambda w: w.pop(min(w))), "has no weights for .*layers.0.self_attn.q_proj.lora_A.* and 0 more"
    ),
    "no such module": (lambda f: edit_config(f, target_modules=["fc1"]), "does not fit the model: .*fc1"),
    "another base": (without_first_of_the_base, "the checkpoint lacks model.layers.1.mlp.up_proj.weight"),
    "tied": (tied_head, "LoRA on lm_head.weight, which is tied"),
    "full": (full, "takes 0.0 GB, but .* has only 0.0 GB left"),
    "8 bits": (lambda f: quantize_config(f, quant_method="bitsandbytes", load_in_8bit=True), "not in 16 bits or in 4 bits of"),
    "GPTQ": (lambda f: quantize_config(f, quant_method="gptq", bits=4), "base cannot be read: .*GPTQConfig"),
    "no folder can be made": (lambda f: (f / "merged.incomplete").symlink_to("gone"), "merged.incomplete cannot be made"),
    "out": (is_there, "exists and is not empty"),
    "incomplete": (lambda f: (f / "merged.incomplete").mkdir(), "a merge was killed: delete this folder"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    adapter_of(llama(folder / "base"), folder / "adapter")
    return folder


@pytest.mark.every(4)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name, trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(layer_by_layer, "shutil", shutil)
    prepare, message = REFUSED[name]
    prepare(tmp_path)
    before = {file for folder in tmp_path.glob("merged*") for file in (folder, *folder.rglob("*"))}
    with pytest.raises(layer_by_layer.Refused, match=message):
        by_layer(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "merged", **options())
    assert {file for folder in tmp_path.glob("merged*") for file in (folder, *folder.rglob("*"))} == before


def test_a_mount_point_is_refused_before_the_merge(trained):
    with pytest.raises(layer_by_layer.Refused, match=r"/proc is a mount point\. Choose"):
        by_layer(str(trained / "base"), str(trained / "adapter"), Path("/proc"), **options())


def test_a_merge_that_started_meanwhile_keeps_its_files(trained, tmp_path, monkeypatch):
    other = tmp_path / "merged.incomplete" / "0.safetensors"
    with_adapter = layer_by_layer.with_adapter

    def meanwhile(*arguments):
        other.parent.mkdir()
        other.touch()
        return with_adapter(*arguments)

    monkeypatch.setattr(layer_by_layer, "with_adapter", meanwhile)
    with pytest.raises(layer_by_layer.Refused, match=r"merged\.incomplete cannot be made: File exists"):
        by_layer(str(trained / "base"), str(trained / "adapter"), tmp_path / "merged", **options())
    assert other.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_leaves_no_half_checkpoint(error, trained, tmp_path, monkeypatch):
    write, seen = layer_by_layer.Shards.write, []

    def interrupted(self):
        write(self)
        seen.append(sorted(file.suffix for file in self.folder.iterdir()))
        if len(self.files) == 2:
            raise error

    monkeypatch.setattr(layer_by_layer, "SHARD", 1)
    monkeypatch.setattr(layer_by_layer.Shards, "write", interrupted)
    arguments = str(trained / "base"), str(trained / "adapter"), tmp_path / "merged"
    with pytest.raises(error):
        by_layer(*arguments, **options())
    assert len(seen) == 2 and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["NF4_PATCH", "NF4_USE_TRITON"])
def test_a_merge_without_the_patch_is_an_error(name, trained, tmp_path, monkeypatch, capsys):
    nf4_patch.disable()
    monkeypatch.setenv(name, "0")
    words = "--model", trained / "base", "--adapter", trained / "adapter", "--out", tmp_path / "merged"
    with pytest.raises(SystemExit) as stopped:
        merge_adapter(*words, monkeypatch=monkeypatch)
    assert stopped.value.code == 2 and name in capsys.readouterr().err and not (tmp_path / "merged").exists()


@pytest.mark.full
def test_a_model_needs_an_adapter(tmp_path):
    """Random weights are merged only into a random model."""
    command = ["python", EXAMPLES / "merge_adapter.py", "--model", tmp_path, "--out", "merged"]
    done = completed(command, tmp_path)
    assert done.returncode == 2 and "--adapter FOLDER" in done.stderr
