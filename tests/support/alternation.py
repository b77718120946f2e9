"""Two lists of cases without their whole product: each run has every way with one of the names, and the full run has all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def alternating(names: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """(name, way): every way with one of the names, the next way with the next name."""
    return list(zip(itertools.cycle(names), ways))


def crossed(names: Iterable[Any], ways: Iterable[Any]) -> list[Any]:
    """Every (name, way) in the full run, the alternating ones in each run."""
    names, ways = list(names), list(ways)
    quick = alternating(names, ways)
    return [
        pytest.param(*pair, marks=() if pair in quick else pytest.mark.full) for pair in itertools.product(names, ways)
    ]
