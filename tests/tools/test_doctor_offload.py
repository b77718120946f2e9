"""nf4-patch doctor --offload MODEL: the sizes of the model, and the line that it prints for a GPU."""

from __future__ import annotations

import pytest
import torch
import transformers
from offloaded import dense_model, load_dense, packed_of, tensors_of
from tiny_experts import random_model, saved

from nf4_patch.offload import planning
from nf4_patch.patching.option import size_of
from nf4_patch.tools import offload as module
from nf4_patch.tools.report import NotAvailable

GB = 10**9


def test_packed_sizes_are_those_of_the_loaded_model(tmp_path):
    saved(dense_model(3), tmp_path)
    loaded = load_dense(tmp_path, llm_int8_skip_modules=["lm_head"])
    with torch.device("meta"):
        sizes = module.sizes_of(dense_model(3, "meta"))
    held = sum(tensor.nbytes for each in packed_of(loaded).values() for tensor in tensors_of(*each))
    assert sizes.layers.total() == held and len(sizes.layers) == 3 and not sizes.is_mixture


@pytest.mark.parametrize(("gpu", "offload"), [(3, ""), (4, "all"), (7, "4.5GiB"), (11, "8GiB"), (12, "off")])
def test_the_line_for_a_gpu(gpu, offload):
    """The model has ten layers of 1 GB, and 1.4 GB of other memory."""
    sizes = module.Sizes(module.Counter({f"layers.{n}": GB for n in range(10)}), int(1.4 * GB), False)
    found, host = sizes.line(gpu * GB)
    assert found == offload
    if size := size_of(offload):
        assert 2 * GB < size <= gpu * GB - module.CUDA_BYTES - sizes.others and host == 12 * GB - size


def test_doctor_names_auto_where_a_size_would_do(tmp_path, monkeypatch):
    random_model("qwen3").config.save_pretrained(tmp_path)
    sizes = module.Sizes(module.Counter({f"layers.{n}": GB for n in range(10)}), int(1.4 * GB), False)
    monkeypatch.setattr(module, "sizes_of", lambda model: sizes)
    _, small, middle, auto, large = module.lines(str(tmp_path), [(0, 4 * GB), (1, 7 * GB), (2, 12 * GB)])
    assert 'offload="all"' in small and 'offload="4.5GiB"' in middle and "offload" not in large
    assert auto == '    or offload="auto", which finds the size in training; 10.0 GB of host memory'


def test_without_a_gpu_doctor_names_usual_ones(tmp_path, monkeypatch):
    random_model("qwen3").config.save_pretrained(tmp_path)
    sizes = module.Sizes(module.Counter({f"layers.{n}": GB for n in range(20)}), int(1.4 * GB), False)
    monkeypatch.setattr(module, "sizes_of", lambda model: sizes)
    found = [line.partition(": ") for line in module.lines(str(tmp_path), []) if "a GPU of" in line]
    assert [place.strip() for place, *_ in found] == [f"a GPU of {card} GB" for card in (12, 16, 24, 48)]
    lines = [line for *_, line in found]
    assert ['offload="' in line for line in lines] == [True, True, False, False] and "free" not in "".join(lines)
    assert 'cache="off"' in lines[2] and "cache" not in lines[3]  # 2.6 GB are too little for a cache


def test_what_doctor_says(tmp_path, monkeypatch):
    random_model("qwen3").config.save_pretrained(tmp_path)
    monkeypatch.setattr(planning, "free_memory", lambda: 5 * GB)
    monkeypatch.setattr(module, "CUDA_BYTES", 0)
    first, *others = module.lines(str(tmp_path), [(0, 10 * GB), (1, 10)])
    assert "GB of packed weights in 2 layers" in first and "This estimate is careful" in first
    assert others == [
        '  GPU 0: nf4_patch.enable("fast", experts="4bit"), device_map={"": 0}; 0.0 GB of host memory, of which 5.0 GB are free',
        '  GPU 1: too small even with offload="all". Train fewer tokens, a smaller rank, or fewer layers',
    ]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.T5Config(), "the type t5 is no causal language model"),
        (transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2), "can be packed in 4 bits"),
    ],
)
def test_a_model_that_cannot_be_estimated_is_an_error(config, says, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(NotAvailable, match=says):
        list(module.lines(str(tmp_path), []))
