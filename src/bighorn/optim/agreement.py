"""A check that ranks step the same parameters, in the same order and with the same options.

Sums of several tensors are sent in one message, so ranks with different orders would add up sums of different tensors
without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bighorn.distributed.flat import FlatGroup
from bighorn.distributed.sharding import RankSums, ReduceGroup, ShardedDims, described_option
from bighorn.optim.algorithm import Group
from bighorn.optim.entry import Entry
from bighorn.optim.settings import Settings


def check_agreement(entries: Iterable[Entry], groups: list[Group], options: Iterable[str], settings: Settings) -> None:
    """Compare the parameters and options of the ranks of each mesh, with one collective per mesh if they agree.

    Args:
        entries: Every parameter, in the order in which a step visits them.
        groups: The groups of the parameters.
        options: The names of the groups' options.
        settings: Options of the whole optimizer, some of which need sums of their own.

    Raises:
        ValueError: The ranks differ. Every rank raises, and the message names the first difference. Or parameters are
            on meshes with different ranks, and a norm of all gradients needs a process group.
    """
    on_meshes: dict[object, list[Entry]] = {}
    holders = []
    for entry in entries:
        holders.append(entry.holders)
        if entry.ranks is not None:
            key = entry.ranks if isinstance(entry.ranks, FlatGroup) else entry.ranks.mesh
            on_meshes.setdefault(key, []).append(entry)
    pairs = [(_ranks(mine), mine) for mine in on_meshes.values()]
    names = list(options)
    for ranks, mine in sorted(pairs, key=lambda pair: pair[0].order):
        ranks.check_same(described(mine, groups, names, settings))
    settings.refuse_apart(holders)


def described(entries: Iterable[Entry], groups: list[Group], options: Iterable[str], settings: Settings) -> list[str]:
    """Return a line for each option and parameter, which are the same on ranks that step alike.

    Args:
        entries: As for `check_agreement`.
        groups: As for `check_agreement`.
        options: As for `check_agreement`.
        settings: As for `check_agreement`.
    """
    whole = [f"{name}={getattr(settings, name)!r}" for name in ("max_grad_norm", "skip_nonfinite")]
    whole.append(f"grad_norm_group={'a process group' if settings.grad_norm_group is not None else None}")
    return [*whole, *_described(entries, groups, options)]


def _ranks(entries: list[Entry]) -> RankSums:
    """The ranks that add up the sums of parameters on one mesh, or in flat tensors of one process group."""
    if isinstance(ranks := entries[0].ranks, FlatGroup):
        return ranks
    return ReduceGroup.of([entry.ranks for entry in entries if isinstance(entry.ranks, ShardedDims)])


def _described(entries: Iterable[Entry], groups: list[Group], options: Iterable[str]) -> Iterator[str]:
    """Yield a line for each option of a group, before the group's first parameter, and a line for each parameter."""
    seen = set()
    for entry in entries:
        index, what = entry.variant.group, f"param_groups[{entry.variant.group}]"
        if index not in seen:
            seen.add(index)
            yield from (f"{what}: {name}={described_option(groups[index][name])}" for name in options)
        flags = [name for name, value in entry.variant._asdict().items() if value is True]
        layout = "" if entry.ranks is None else f" as {entry.layout or 'a part of a flat tensor'}"
        yield f"{what}: {entry.label} of shape {entry.shape}{layout} ({', '.join(flags)})"
