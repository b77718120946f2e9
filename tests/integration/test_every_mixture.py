"""Every mixture of transformers is packed, reloaded, trained with LoRA, merged and exported, as the table in the docs says."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("bitsandbytes.nn.parametrize", reason="bitsandbytes before 0.46")
pytest.importorskip("transformers.core_model_loading", reason="transformers before 5")

from every_mixture import kind_of, mixtures, walked

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the table is of a CPU")
DATA = json.loads((Path(__file__).parents[2] / "docs" / "data" / "mixtures.json").read_text())
OF_THE_TABLE = DATA["releases"]["transformers"] == metadata.version("transformers")
# the rest: scripts/test --all
AT_EVERY_CHANGE = ("jetmoe",)


@pytest.mark.skipif(not OF_THE_TABLE, reason="the table is of another release of transformers")
def test_the_table_has_every_mixture():
    """The table omits only mixtures whose experts are linear layers, which bitsandbytes packs itself."""
    assert mixtures().keys() - DATA["mixtures"].keys() == {"nllb_moe", "switch_transformers"}


@pytest.mark.parametrize(
    "name", [n if n in AT_EVERY_CHANGE else pytest.param(n, marks=pytest.mark.full) for n in DATA["mixtures"]]
)
def test_a_mixture_is_what_the_table_says(name):
    kind = kind_of(name) if hasattr(transformers.models, name) else None
    if kind is None:
        pytest.skip("not in this release of transformers")
    found = walked(name, kind)
    if OF_THE_TABLE:
        assert found == DATA["mixtures"][name]
    assert found["packed"] == "yes" or found["packed"].startswith("in 16 bits")
    assert {found["tutorial"], found["parameters"]} <= {"yes", "-"}
