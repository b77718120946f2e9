"""Choose some cases of a product for each run. The full run has all cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def alternating(names: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return (name, way) for every way. Each way gets the next name, in a cycle."""
    return list(zip(itertools.cycle(names), ways))


def crossed(names: Iterable[Any], ways: Iterable[Any], every: int = 1, only: Iterable[Any] | None = None) -> list[Any]:
    """Return every (name, way). Pairs that only the full run has are marked.

    Each run has the alternating pairs of the ways ``only``, or each alternating pair whose number is a multiple of
    ``every``.
    """
    names, ways = list(names), list(ways)
    quick = [pair for pair in alternating(names, ways)[::every] if only is None or pair[1] in only]
    return [pytest.param(*pair, marks=marks(pair in quick)) for pair in itertools.product(names, ways)]


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Return every case. Cases whose number is no multiple of ``every`` are marked for the full run."""
    return [pytest.param(case, marks=marks(number % every == 0)) for number, case in enumerate(cases)]


def marks(quick: bool) -> Any:
    return () if quick else pytest.mark.full
