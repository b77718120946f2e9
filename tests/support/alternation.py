"""Cases without their whole product: each run has some of them, and the full run has all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def alternating(names: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """(name, way): every way with one of the names, the next way with the next name."""
    return list(zip(itertools.cycle(names), ways))


def crossed(names: Iterable[Any], ways: Iterable[Any], every: int = 1, only: Iterable[Any] | None = None) -> list[Any]:
    """Every (name, way) in the full run. In each run, the alternating ones: those of the ways ``only``, or ``every`` second, third ... one."""
    names, ways = list(names), list(ways)
    quick = [pair for pair in alternating(names, ways)[::every] if only is None or pair[1] in only]
    return [pytest.param(*pair, marks=marks(pair in quick)) for pair in itertools.product(names, ways)]


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Every case in the full run, and ``every`` second, third ... one in each run."""
    return [pytest.param(case, marks=marks(number % every == 0)) for number, case in enumerate(cases)]


def marks(quick: bool) -> Any:
    return () if quick else pytest.mark.full
