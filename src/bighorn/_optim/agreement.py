"""Checks that ranks step the same parameters, in the same order and with the same options, and have their gradients.

Sums of several tensors are sent in one message: ranks with different orders would add up sums of different tensors
without an error, and ranks with different gradients would wait for each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from bighorn._distributed.flat import FlatGroup
from bighorn._distributed.sharding import RankSums, ReduceGroup, ShardedDims, described_option
from bighorn._optim.algorithm import Group
from bighorn._optim.entry import Entry
from bighorn._optim.settings import Settings

EntriesOfRanks = Mapping[RankSums, list[Entry]]
"""The entries of sharded parameters, by the ranks that add up their sums, in the same order on every rank."""


def by_ranks(entries: Iterable[Entry]) -> EntriesOfRanks:
    """Return the entries of sharded parameters on each mesh, or in the flat tensors of each process group."""
    found: dict[object, list[Entry]] = {}
    for entry in entries:
        if entry.ranks is not None:
            key = entry.ranks if isinstance(entry.ranks, FlatGroup) else entry.ranks.mesh
            found.setdefault(key, []).append(entry)
    pairs = [(_ranks(members), members) for members in found.values()]
    return dict(sorted(pairs, key=lambda pair: pair[0].order))


def check_agreement(entries: list[Entry], groups: list[Group], options: Iterable[str], settings: Settings) -> None:
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
    names = list(options)
    for ranks, members in by_ranks(entries).items():
        ranks.check_same(described(members, groups, names, settings))
    settings.refuse_apart(entry.holders for entry in entries)


def refuse_zeros(entries: list[Entry], why: str) -> None:
    """Refuse weights that are all 0, in whole parameters and in slices of stacked ones.

    Args:
        entries: The parameters, the same on every rank that steps them.
        why: What zeros would do, with the remedy.

    Raises:
        ValueError: A parameter or a slice has elements, and all of them are 0. Every rank raises.
    """
    present = [entry for entry in entries if math.prod(entry.shape) > 0 and not entry.local().is_meta]
    nonzero = {
        entry.label: torch.stack([slot.any() for slot in entry.slices(entry.local())]).float() for entry in present
    }
    for ranks, members in by_ranks(present).items():
        ranks.all_reduce([(entry.ranks, nonzero[entry.label]) for entry in members])
    if present and not bool(torch.cat([found.to(entries[0].param.device) for found in nonzero.values()]).all()):
        label, found = next((label, found) for label, found in nonzero.items() if not bool(found.all()))
        slot = f"[{int(found.argmin())}]" if len(found) > 1 else ""
        raise ValueError(f"{label}{slot} is zero, and {why}")


class Presence:
    """The names of sharded parameters, to compare at each step which of them have gradients.

    Args:
        entries: Every parameter, in the order in which a step visits them.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self._labels = {
            ranks: [(id(entry.param), entry.label) for entry in members] for ranks, members in by_ranks(entries).items()
        }
        self.stepped_alone: dict[RankSums, None] = {}
        """The ranks with which single parameters were stepped, inside backward."""
        self._first = True

    def check(self, groups: list[Group]) -> None:
        """Compare the gradients of the ranks of each mesh, with one collective.

        Ranks whose sums are on devices compare them at the first step alone, since the host waits for the devices.

        Args:
            groups: The groups that take the step.

        Raises:
            ValueError: The ranks differ. Every rank raises, and the message names the first difference.
        """
        for ranks in self.stepped_alone:
            ranks.check_same(["nothing more to step inside of backward"], GIVE_GRADIENTS)
        words = {id(param): "without" if param.grad is None else "with" for each in groups for param in each["params"]}
        for ranks, labels in self._labels.items():
            if self._first or ranks.device_type == "cpu":
                lines = [f"{label} {words[param]} a gradient" for param, label in labels if param in words]
                ranks.check_same(lines, GIVE_GRADIENTS)
        self._first = False


GIVE_GRADIENTS = "Give every rank a gradient of each sharded parameter, of zeros if its loss does not use it, or none"


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
