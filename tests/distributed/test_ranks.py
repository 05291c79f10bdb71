"""Failures and skips of tests on several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks as support
from tests.support.ranks import ranks


@ranks(2)
def meet(here: int) -> None:
    total = torch.tensor(here)
    dist.all_reduce(total)
    assert total == 2 * here


@ranks(2)
def ends(how: str) -> None:
    rank = dist.get_rank()
    if how == "fails":
        assert rank + 1 == 1
    if how == "skips" and rank:
        pytest.skip("too little memory")
    if how == "waits" and rank:
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("fails", r"(?s)^rank 1: .*in ends\n.*assert \(1 \+ 1\) == 1"),
        ("waits", r"(?s)^rank 1: waits.*in barrier"),
    ],
)
def test_a_failure_names_the_rank_and_the_next_test_has_other_processes(
    how: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet(4)  # so that the processes have begun
    if how == "waits":
        monkeypatch.setattr(support, "LIMIT", 5)
    with pytest.raises(pytest.fail.Exception, match=text):
        ends(how)
    monkeypatch.undo()
    meet(4)


def test_a_skip_of_a_rank_is_a_skip_of_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="rank 1: too little memory"):
        ends("skips")
