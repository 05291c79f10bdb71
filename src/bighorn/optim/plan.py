"""From parameters and gradients to buckets: made when something changed, then only fed with gradients."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bighorn import kernels, sharding
from bighorn.arguments import about
from bighorn.kernels import Bucket, Kernel, ShardKernel
from bighorn.kernels.addresses import has_memory
from bighorn.kernels.bucket import Shard
from bighorn.optim.algorithm import Variant
from bighorn.optim.parts import Part, row_shard
from bighorn.sharding import Cut, Ranks
from bighorn.state import REAL_DTYPES, local_view, overlaps, real_view, refuse_freed

State = dict[str, Any]


@dataclass
class Feed:
    """How one part's parameter and gradient reach its rows at each step."""

    view: Tensor  # what lies here of the parameter, real, in its own memory
    dense: Tensor  # what kernels work on: `view`, or a dense copy of it
    stacked: bool
    shard: Shard | None
    """Where `view` lies in the parameter; None if it is all of it."""

    @property
    def row_size(self) -> int:
        """How many elements a row has, all of it."""
        shape = self.shard.shape if self.shard else self.dense.shape
        return math.prod(shape[1:] if self.stacked else shape)

    def grad_rows(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The rows of a gradient."""
        return self.rows(real_view(grad.resolve_conj()).resolve_neg())

    def rows(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The rows of a tensor of its dims or of some of them; slices that lie on other ranks are empty here."""
        if not self.stacked:
            return (tensor,)
        if self.shard is None:
            return tensor.unbind()
        elsewhere = (tensor.new_empty((0,) * (tensor.dim() - 1)),)
        before = self.shard.offset[0]
        return elsewhere * before + tensor.unbind() + elsewhere * (self.shard.shape[0] - before - tensor.shape[0])

    def shards(self) -> list[Shard]:
        """Where each row lies in the whole one; empty if all are whole."""
        if self.shard is None or not self.stacked:
            return [self.shard] if self.shard else []
        first = self.shard.offset[0]
        return [self.shard.of_slice(first <= i < first + self.shard.size[0]) for i in range(self.shard.shape[0])]


@dataclass
class Slot:
    """A bucket, and where its rows come from."""

    bucket: Bucket[Any]
    variant: Variant
    feeds: list[Feed] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Which parts they are of."""
    direct: bool = True
    """Parameters and gradients are used as they are."""

    def add(self, feed: Feed, index: int, moments: State, step: Tensor, number: int) -> range:
        """Add the rows of a part, whose random bits a number tells from others'; returns which they are."""
        bucket, first = self.bucket, len(self.bucket.params)
        self.feeds.append(feed)
        self.indices.append(index)
        bucket.params += feed.rows(feed.dense)
        bucket.shards += feed.shards()
        for name, value in moments.items():
            bucket.state.setdefault(name, []).extend(feed.rows(value))
        rows = range(first, len(bucket.params))
        bucket.steps += [step] * len(rows)
        bucket.numbers += [number] * len(rows)
        bucket.firsts += [i * feed.row_size for i in range(len(rows))]
        bucket.counts.append(step)
        return rows


class Launch(NamedTuple):
    """A kernel for shards."""

    kernel: ShardKernel
    device: torch.device
    cut: Cut


@dataclass
class Plan:
    """Everything about a step that stays as it is until something moves, which `plan_cache.py` sees."""

    slots: list[Slot]
    kernels: list[tuple[torch.device, Kernel]]
    """Those for tensors that lie here altogether."""
    meshes: dict[Ranks, list[Launch]]
    """Those for shards, by who adds up sums over them."""
    labels: tuple[str, ...]
    rows: list[int]
    """Per label: its row, where those of all buckets are counted through."""
    _rows: Tensor | None = None

    def feed(self, grads: list[Tensor], options: dict[Variant, Any]) -> None:
        """Hand this step's gradients, what of them lies here, and options to the buckets."""
        for slot in self.slots:
            slot.bucket.options = options[slot.variant]
            slot.bucket.grads = mine = list(map(grads.__getitem__, slot.indices))
            if slot.direct:
                continue
            slot.bucket.grads = [row for feed, g in zip(slot.feeds, mine, strict=True) for row in feed.grad_rows(g)]
            for feed in slot.feeds:
                if feed.dense is not feed.view:
                    feed.dense.copy_(feed.view)

    def prepare(self) -> None:
        """Do whatever can fail, before any kernel of a step writes."""
        for _, kernel in self.kernels:
            kernel.prepare()
        for launches in self.meshes.values():
            for launch in launches:
                launch.kernel.prepare()

    def square_sums(self) -> list[Tensor]:
        """Sums of all gradients' squares, whatever ranks these lie on."""
        sums = [kernel.square_sum() for _, kernel in self.kernels]
        for ranks, launches in self.meshes.items():
            sums.append(ranks.total([(launch.cut, launch.kernel.square_sum()) for launch in launches]))
        return sums

    def step(self, scale: Tensor | float, commit: Tensor | None) -> None:
        """One step of all kernels; those for shards on one mesh go from sum to sum together."""
        for device, kernel in self.kernels:
            kernel.step(_on(scale, device), _on(commit, device))
        for ranks, launches in self.meshes.items():
            running = [
                (cut, kernel.rounds(_on(scale, device), _on(commit, device))) for kernel, device, cut in launches
            ]
            while parts := [(cut, part) for cut, rounds in running if (part := next(rounds, None)) is not None]:
                ranks.add_up(parts)

    def finish(self) -> None:
        """Write dense copies back to the parameters that they stand for, and let go of the gradients."""
        for slot in self.slots:
            slot.bucket.grads = []
            for feed in slot.feeds if not slot.direct else ():
                if feed.dense is not feed.view:
                    feed.view.copy_(feed.dense)

    def figures(self) -> Tensor:
        """What kernels wrote of the last step, and the learning rate that they were told, `[labels, 4]`."""
        device = self.slots[0].bucket.norms.device
        if self._rows is None:
            self._rows = torch.tensor(self.rows, dtype=torch.int64, device=device)
        tables = []
        for slot in self.slots:
            norms, lr = slot.bucket.norms, slot.bucket.options.lr
            lrs = lr.to(norms).expand(len(norms), 1) if isinstance(lr, Tensor) else norms.new_full((len(norms), 1), lr)
            tables.append(torch.cat([norms, lrs], dim=1).to(device))
        return torch.cat(tables)[self._rows]


def build(
    parts: list[Part],
    grads: list[Tensor],
    options: dict[Variant, Any],
    complete: Callable[[Part, Tensor], tuple[State, list[str]]],
    backend: str,
) -> tuple[Plan, list[State]]:
    """A plan for the parts, and each part's state, complete but not yet the optimizer's: nothing has changed so far.

    Args:
        parts: What takes part, in the optimizer's order.
        grads: Their gradients.
        options: The options of each variant.
        complete: Gives the state of a part whose parameter kernels will see as the tensor that is handed over, and
            the names of the tensors in it that kernels work on.
        backend: The one that is asked for, or "auto".

    Raises:
        RuntimeError: A gradient is sparse.
        ValueError: A gradient does not fit its parameter, parameters share memory, or the backend that is asked for
            does not serve one.
    """
    slots: dict[tuple[object, ...], Slot] = {}
    backends: dict[tuple[str, torch.device, Cut | None], list[Bucket[Any]]] = {}
    states: list[State] = []
    labels: list[str] = []
    rows: list[tuple[Slot, int]] = []
    wrappers: list[tuple[Slot, str]] = []
    for index, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        _check_grad(part, grad)
        view, grad = local_view(part.param), sharding.local(grad)
        refuse_freed(view, part.label)
        refuse_freed(grad, f"the gradient of {part.label}")
        if overlaps(view):
            raise ValueError(f"{part.label} has elements that share memory (an expanded tensor): clone() it first")
        dense = view if is_dense(view, part.leading) else view.clone(memory_format=torch.contiguous_format)
        state, kept = complete(part, dense)
        states.append(state)
        mine = {entry: sharding.local(state[entry]) for entry in kept}
        shard, solid = row_shard(part.param, part.stacked), all(map(has_memory, (dense, grad, *mine.values())))
        with about(part.label):
            name, _ = kernels.pick(backend, dense, options[part.variant], shard, solid)
        wrapper = None if solid else index  # its kind of tensor has its own bucket
        key = (part.variant, name, dense.device, dense.dtype, mine[kept[0]].dtype, part.cut, wrapper, *kept)
        if key not in slots:
            slots[key] = Slot(Bucket(options[part.variant], [], {}, [], [], torch.empty(0)), part.variant)
            backends.setdefault((name, dense.device, part.cut), []).append(slots[key].bucket)
        slot = slots[key]
        if not solid:
            wrappers.append((slot, part.label))
        feed = Feed(view, dense, part.stacked, sharding.shard_of(part.param))
        added = slot.add(feed, index, mine, state["step"], zlib.crc32(part.label.encode()))
        slot.direct &= not part.stacked and dense is view and not part.param.is_complex() and not grad.is_neg()
        labels += [f"{part.label}[{i}]" for i in range(len(added))] if part.stacked else [part.label]
        rows += [(slot, row) for row in added]
    _check_disjoint(
        [(parts[i], feed) for slot in slots.values() for i, feed in zip(slot.indices, slot.feeds, strict=True)]
    )

    for (_, device, _), buckets in backends.items():
        for bucket in buckets:
            bucket.norms = torch.zeros(len(bucket.params), 3, dtype=torch.float32, device=device)
    sizes = [len(slot.bucket.params) for slot in slots.values()]
    starts = dict(zip(map(id, slots.values()), itertools.accumulate(sizes, initial=0), strict=False))
    plan = Plan(list(slots.values()), [], {}, tuple(labels), [starts[id(slot)] + row for slot, row in rows])
    plan.feed(list(map(sharding.local, grads)), options)
    for slot, label in wrappers:
        _try_on_copies(slot, label)
    cuts = [cut for _, _, cut in backends if cut is not None]
    for (name, device, cut), buckets in backends.items():
        kernel = getattr(kernels.BACKENDS[name], buckets[0].options.algorithm)(buckets)
        if cut is None:
            plan.kernels.append((device, kernel))
        else:
            ranks = Ranks.of([other for other in cuts if other.mesh == cut.mesh])
            plan.meshes.setdefault(ranks, []).append(Launch(kernel, device, cut))
    return plan, states


def _try_on_copies(slot: Slot, label: str) -> None:
    """Step copies of a wrapper subclass's tensors, since what these can do is not known before; nothing else changes.

    Raises:
        ValueError: They cannot be stepped.
    """
    bucket = slot.bucket

    def copies(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]

    try:
        counts = copies(bucket.counts)
        trial = replace(
            bucket,
            params=copies(bucket.params),
            state={name: copies(tensors) for name, tensors in bucket.state.items()},
            steps=counts * len(bucket.params),
            counts=counts,
            norms=bucket.norms.clone(),
            grads=copies(bucket.grads),
        )
        for _ in getattr(kernels.BACKENDS["reference"], bucket.options.algorithm)([trial]).rounds():
            pass
    except Exception as error:
        kinds = {type(tensor).__name__ for tensor in (*bucket.params, *bucket.grads)}
        raise ValueError(
            f"{label} cannot be stepped: it or its gradient is a {' or a '.join(sorted(kinds))}, and a step of copies "
            f"failed: {error}"
        ) from error


def _check_grad(part: Part, grad: Tensor) -> None:
    param = part.param
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {part.label} has layout {grad.layout}, but only dense gradients are supported: build the "
            "embedding with sparse=False, or give its parameters to torch.optim.SparseAdam"
        )
    layout, its = part.layout, sharding.layout_of(grad)
    if layout != its:
        raise ValueError(
            f"the gradient of {part.label} lies as {its or 'a plain tensor'}, the parameter as "
            f"{layout or 'a plain tensor'}: redistribute it first, "
            "p.grad = p.grad.redistribute(placements=p.placements)"
        )
    fits = grad.shape == param.shape and grad.is_complex() == param.is_complex() and grad.device == param.device
    if not fits or not (grad.is_complex() or grad.dtype in REAL_DTYPES):
        raise ValueError(
            f"the gradient of {part.label} has shape {tuple(grad.shape)} and dtype {grad.dtype} on {grad.device}, the "
            f"parameter {tuple(param.shape)} and {param.dtype} on {param.device}: compute it anew, after zero_grad(), "
            "in a floating dtype of 16 bits or more"
        )


def _check_disjoint(feeds: list[tuple[Part, Feed]]) -> None:
    """Two parameters in the same memory would be stepped twice, by two threads at once."""
    spans = sorted(
        (feed.view.data_ptr(), feed.view.data_ptr() + feed.view.nbytes, part.label)
        for part, feed in feeds
        if feed.view.device.type != "meta" and feed.view.numel() and has_memory(feed.view) and is_dense(feed.view, 0)
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end and first == second:
            raise ValueError(f"{first} is among the parameters twice: take one of the two out of its group")
        if start < end:
            raise ValueError(f"{first} and {second} share memory: pass only one of them, or clone() one")


def is_dense(tensor: Tensor, leading: int) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, the first `leading` dims in order."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return False
    inner = [math.prod(tensor.shape[i + 1 :]) for i in range(leading)]
    return tensor.numel() == 0 or list(tensor.stride()[:leading]) == inner


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
