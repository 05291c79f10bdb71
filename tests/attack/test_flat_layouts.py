"""Random and damaged layouts of flat tensors: whole ones are accepted, and an error is raised on every rank.

The ranks are a list; tests/distributed/test_flat_ranks.py runs them as processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from bighorn import FlatLayout, Fragment
from bighorn._distributed.flat import FlatGroup, FlatParams
from tests.support.attack_settings import tries

SHAPES = [(), (1,), (7,), (0,), (0, 3), (4, 6), (5, 1), (3, 5, 2)]
WRONG = [-1, 10**30, 1.5, "3", None, True, (2, -1), (1.5,), "shape", b"name"]
Rank = list[list[Fragment]]


@st.composite
def layouts(draw: st.DrawFn) -> list[Rank]:
    """Draw a layout for each rank; together they hold whole parameters, with padding."""
    ranks: list[Rank] = [[[] for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 4)))]
    ends = [[0] * len(its) for its in ranks]
    for index, shape in enumerate(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))):
        size = math.prod(shape)
        holders = draw(st.permutations(range(len(ranks))))[: draw(st.integers(1, len(ranks)))]
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=len(holders) - 1, max_size=len(holders) - 1)))
        for rank, first, last in zip(holders, [0, *cuts], [*cuts, size], strict=True):
            tensor = draw(st.integers(0, len(ranks[rank]) - 1))
            start = ends[rank][tensor] + draw(st.integers(0, 2))
            ranks[rank][tensor].append(Fragment(f"p{index}", shape, last - first, start, first))
            ends[rank][tensor] = start + last - first
    return [[draw(st.permutations(own)) for own in its] for its in ranks]


def joined(ranks: Sequence[Any]) -> list[FlatParams | str]:
    """Return the parameters of each rank, or its error."""
    sent: list[Any] = []

    class SentError(Exception):
        pass

    def send(_: FlatGroup, value: object) -> list[Any]:
        sent.append(value)
        raise SentError

    def on_each(gather: Any, error: type[Exception]) -> list[Any]:
        found: list[Any] = []
        for its, sizes in ranks:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FlatGroup, "gather", gather)
                patch.setattr(FlatGroup, "ranks", list(range(len(ranks))))
                try:
                    found.append(FlatParams.of(FlatLayout(its), [torch.ones(size) for size in sizes], "group"))
                except error as raised:
                    found.append(str(raised))
        return found

    on_each(send, SentError)
    return on_each(lambda *_: sent, ValueError)


def with_sizes(ranks: Sequence[Rank]) -> list[tuple[Any, list[int]]]:
    return [(its, [max([each.start + each.numel for each in own], default=0) for own in its]) for its in ranks]


@tries(300)
@given(layouts())
def test_a_whole_layout_is_accepted(ranks: list[Rank]) -> None:
    for (its, _), found in zip(with_sizes(ranks), joined(with_sizes(ranks)), strict=True):
        assert isinstance(found, FlatParams)
        held = {each.name: each for own in its for each in own}
        for param in found.params:
            fragment = held.get(param.name, Fragment(param.name, param.shape, 0))
            assert (len(param.elements), param.elements.start) == (fragment.numel, fragment.offset)


@tries(300)
@given(layouts(), st.data())
def test_a_damaged_layout_is_refused_by_all_ranks_or_none(ranks: list[Rank], data: st.DataObject) -> None:
    given_ranks = with_sizes(ranks)
    places = [(rank, i, j) for rank, its in enumerate(ranks) for i, own in enumerate(its) for j in range(len(own))]
    rank, i, j = data.draw(st.sampled_from(places))
    own = list(ranks[rank][i])
    what = data.draw(st.sampled_from(["name", "shape", "numel", "start", "offset", "lost", "twice", "other", "flat"]))
    damaged: dict[str, Any] = {"lost": [], "twice": [own[j]] * 2, "other": [data.draw(st.sampled_from(WRONG))]}
    if what in damaged:
        own[j : j + 1] = damaged[what]
    elif what != "flat":
        wrong: dict[str, Any] = {what: data.draw(st.sampled_from(WRONG))}
        own[j] = replace(own[j], **wrong)
    its: Any = own if what == "flat" else [own if at == i else each for at, each in enumerate(ranks[rank])]
    given_ranks[rank] = its, given_ranks[rank][1]
    found = joined(given_ranks)
    refused = [isinstance(each, str) for each in found]
    assert all(refused) or not any(refused)
    assert not any(refused) or len(set(map(str, found))) == 1
    if what in ("flat", "other"):
        assert all(refused)
