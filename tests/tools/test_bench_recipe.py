"""The recipe benchmark: its sides, and its command."""

from __future__ import annotations

import itertools

import pytest
from verbs import run_with_gpu

from benchmarks import recipe

pytestmark = pytest.mark.full


def test_each_side_adds_one_switch():
    """Each side has all switches of the sides before it. The optimizer is the last switch."""
    sides, names = recipe.dense(4).sides, ["patch", "liger", "fused", "graphs", "activations", "cache"]
    options = [sides[name].options for name in names]
    assert all(before.items() <= after.items() for before, after in itertools.pairwise(options))
    assert [*options[-1]] == ["lora", "graphs", "activations", "cache"] and sides["peft"].options is None
    assert [sides[name].kind for name in ["peft", *names]] == ["peft", "peft", *["liger"] * 5]
    assert [sides[name].optimizer for name in ("cache", "paged optimizer")] == ["adamw_torch_fused", "paged_adamw_8bit"]
    offloading = [side for name, side in sides.items() if "offloading" in name]
    assert [(side.checkpointing, side.options) for side in offloading] == [
        ("unsloth", None),
        ("unsloth", {"graphs": "auto"}),
    ]
    best = sides["unsloth, best"]
    assert (best.skips, dict(best.environment)) == ("max", {"UNSLOTH_BLOCK_CUDAGRAPHS": "1"})
    mixture = recipe.mixture().sides
    assert [*mixture] == ["16-bit experts", *[*sides][1:]]
    options = [side.options for side in mixture.values() if side.options is not None and side.kind != "unsloth"]
    assert all(each["experts"] == "4bit" for each in options)  # Unsloth packs experts itself


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), ("Llama-3.1-8B", 4)), (("--layers", "16"), ("Llama-3.1-8B", 16)), (("--small",), ("Llama-3.2-1B", 16)),
        (("--mixture",), ("Qwen3-30B-A3B", 2)),
    ],
    ids=str,
)  # fmt: skip
def test_the_command_measures_what_is_named(words, what, monkeypatch):
    """Without a GPU, the command measures nothing."""
    asked = []
    monkeypatch.setattr(recipe, "measure", lambda found, tell, seconds: asked.append((found.model, found.layers)))
    run_with_gpu(recipe, words, monkeypatch)
    assert asked == [what]
