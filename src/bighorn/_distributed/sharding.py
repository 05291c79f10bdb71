"""Sharded parameters: the shard that this rank holds, and the sums over the ranks of a reduce group."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bighorn._kernels.bucket import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = {Tensor, Parameter}
"""The types of most tensors, which are not distributed."""


@dataclass(frozen=True)
class Layout:
    """The layout of a distributed tensor.

    Attributes:
        mesh: The device mesh.
        placements: For each mesh dim, the dim of the tensor that is sharded along it, or that the tensor is replicated.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]

    @property
    def holders(self) -> list[int]:
        """The ranks of the mesh."""
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    @property
    def sharded_dims(self) -> ShardedDims | None:
        """The mesh dims along which ranks hold different shards; None if each rank holds the whole tensor."""
        dims = [dim for dim, placement in enumerate(self.placements) if _split(placement) >= 0]
        along = tuple(dim for dim in dims if self.mesh.size(dim) > 1)
        return ShardedDims(self.mesh, along) if along else None

    def shard(self, shape: torch.Size) -> Shard:
        """The shard of a tensor of this shape that this rank holds."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        size, offset = compute_local_shape_and_global_offset(shape, self.mesh, self.placements)
        split = frozenset(
            _split(self.placements[dim]) for dim in (self.sharded_dims.along if self.sharded_dims else ())
        )
        return Shard(tuple(shape), tuple(size), tuple(offset), split)

    def of_dims(self, dims: Sequence[int]) -> Layout:
        """The layout of a tensor that has only some dims of a tensor of this layout."""
        return Layout(self.mesh, tuple(_kept(placement, dims) for placement in self.placements))

    def __str__(self) -> str:
        return f"{list(self.placements)} on a mesh of {' x '.join(map(str, self.mesh.shape))}"


class ShardedDims(NamedTuple):
    """The dims of a mesh along which a tensor is sharded."""

    mesh: DeviceMesh
    along: tuple[int, ...]


class RankSums(ABC):
    """Some ranks that add up their sums."""

    device_type: str
    """The type of the devices between which sums are sent."""

    @property
    @abstractmethod
    def ranks(self) -> list[int]:
        """The ranks, in the order of their process group."""

    @property
    @abstractmethod
    def order(self) -> tuple[list[int], tuple[int, ...]]:
        """A key that sorts such objects in the same way on every rank."""

    @property
    def holders(self) -> list[int]:
        """All ranks that hold shards of the tensors, or copies of these shards."""
        return self.order[0]

    @abstractmethod
    def _counts(self, dims: Any) -> bool:
        """Whether this rank contributes its sums, if several hold the same shards."""

    @abstractmethod
    def _group(self) -> Any:
        """The process group. All of its ranks create it together when it is first needed."""

    def all_reduce(self, parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Replace each tensor, in place, by its sum over the ranks, with one collective for all tensors.

        If several ranks hold the same shard, only one of them contributes.
        """
        sums = torch.cat([(part if self._counts(dims) else torch.zeros_like(part)).view(-1) for dims, part in parts])
        for (_, part), total in zip(
            parts, torch.split(self._all_reduce(sums), [part.numel() for _, part in parts]), strict=True
        ):
            part.copy_(total.view(part.shape))

    def total(self, parts: Sequence[tuple[Any, Tensor]]) -> Tensor:
        """Return the sum of all sums of squares over the ranks, in their shape, with one collective."""
        return self._all_reduce(
            torch.stack([part if self._counts(dims) else torch.zeros_like(part) for dims, part in parts]).sum(dim=0)
        )

    def _all_reduce(self, sums: Tensor, op: Any = None) -> Tensor:
        sums = sums.to(self.device_type)
        dist.all_reduce(sums, dist.ReduceOp.SUM if op is None else op, self._group())
        return sums

    def any(self, flag: bool) -> bool:
        """Whether `flag` is True on any of the ranks."""
        return bool(self._all_reduce(torch.tensor(float(flag), device=self.device_type), dist.ReduceOp.MAX))

    def check_same(self, lines: list[str], remedy: str = "Make the optimizer in the same way on every rank") -> None:
        """Compare lines of text, with one collective of two numbers if all ranks have the same.

        Args:
            lines: The lines.
            remedy: The end of the error's message.

        Raises:
            ValueError: The ranks differ. Every rank raises, and the message names the first difference.
        """
        digest = int.from_bytes(
            hashlib.blake2b("\n".join(lines).encode(errors="surrogatepass"), digest_size=6).digest(), "big"
        )
        ends = torch.tensor([digest, -digest], device=self.device_type)
        most, least = self._all_reduce(ends, dist.ReduceOp.MAX).tolist()
        if most == -least:
            return
        everyone: list[list[str]] = [[]] * len(self.ranks)
        dist.all_gather_object(everyone, lines, self._group())
        for entries in itertools.zip_longest(*everyone, fillvalue="nothing more"):
            other = next((rank for rank, entry in enumerate(entries) if entry != entries[0]), None)
            if other is not None:
                raise ValueError(
                    "ranks would add up sums of different tensors, or step them with different options. The first "
                    f"difference: rank {self.ranks[0]} has {entries[0]}, rank {self.ranks[other]} has "
                    f"{entries[other]}. {remedy}"
                )


def described_option(value: object) -> str:
    """The repr of an option; a tensor's leaves out its device, which differs between ranks.

    On devices other than the CPU, the value is left out as well: the host would wait for it.
    """
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.item()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"


@dataclass(frozen=True)
class ReduceGroup(RankSums):
    """The ranks that add up their sums for tensors on one mesh, along all mesh dims that shard any of the tensors."""

    mesh: DeviceMesh
    along: tuple[int, ...]

    @classmethod
    def of(cls, dims: Sequence[ShardedDims]) -> ReduceGroup:
        """Return the reduce group of tensors on one mesh."""
        return cls(dims[0].mesh, tuple(sorted({dim for cut in dims for dim in cut.along})))

    @property
    def device_type(self) -> str:  # type: ignore[override]
        """The type of the mesh's devices."""
        return self.mesh.device_type

    @property
    def ranks(self) -> list[int]:
        """The ranks, in the order of their process group."""
        return list(dist.get_process_group_ranks(self._group()))

    @property
    def order(self) -> tuple[list[int], tuple[int, ...]]:
        """The ranks of the mesh, and the dims."""
        return self.mesh.mesh.flatten().tolist(), self.along

    def _counts(self, dims: ShardedDims) -> bool:
        coordinate = self.mesh.get_coordinate() or ()
        return all(coordinate[dim] == 0 for dim in self.along if dim not in dims.along)

    def _group(self) -> Any:
        if len(self.along) == 1:
            return self.mesh.get_group(self.along[0])
        coordinate, every = self.mesh.get_coordinate() or (), slice(None)
        at = tuple(every if dim in self.along else coordinate[dim] for dim in range(self.mesh.ndim))
        ranks = tuple(self.mesh.mesh[at].flatten().tolist())
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        made = _groups.setdefault(dist.group.WORLD, {})
        if ranks not in made:
            made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return made[ranks]


_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Process groups by their ranks, kept as long as the group of all ranks exists."""


def unsupported_reason(param: Tensor) -> str | None:
    """The reason why a parameter's layer-wise norm cannot be computed from its shards, or None."""
    if getattr(param, "_fsdp_flattened", False):
        return (
            "it belongs to FullyShardedDataParallel, which flattens layers into one tensor, so layer-wise norms have "
            "no meaning there; shard with torch.distributed.fsdp.fully_shard, or use DistributedDataParallel"
        )
    layout = layout_of(param)
    if layout is None:
        return None
    for placement in layout.placements:
        if placement.is_partial():
            return (
                f"it is a DTensor with the placement {placement!r}, a sum that is still to be taken: "
                "redistribute(placements=...) it to Replicate() or Shard(dim) first"
            )
        if not placement.is_replicate() and _split(placement) < 0:
            return f"it is a DTensor with the placement {placement!r}, which is not known here: use Shard or Replicate"
    with torch.no_grad():
        held, expected = tuple(local(param).shape), layout.shard(param.shape).size
    if held != expected:
        return (
            f"it is a DTensor with {layout}, of which this rank holds a part of shape {held} where {expected} would "
            "be regular: distribute it with distribute_tensor, parallelize_module or fully_shard"
        )
    return None


def ranks_of(param: Tensor) -> ReduceGroup | None:
    """The ranks that add up the sums of one parameter on the host; None if it is not sharded, or is on a device."""
    layout = layout_of(param)
    if layout is None or layout.sharded_dims is None or layout.mesh.device_type != "cpu":
        return None
    return ReduceGroup.of([layout.sharded_dims])


def holders_of(param: Tensor) -> list[int] | None:
    """The ranks of a distributed parameter's mesh; None if it is not distributed."""
    layout = layout_of(param)
    return None if layout is None else layout.holders


def counts_on_this_rank(holders: Sequence[int] | None, process_group: Any) -> bool:
    """Whether this rank counts a tensor in a sum over a process group, since its copies on other ranks are the same.

    The first rank of the group among the holders counts it; each rank counts a tensor that is not distributed.
    """
    if holders is None or process_group is None:
        return True
    ranks = dist.get_process_group_ranks(process_group)
    return next((rank for rank in ranks if rank in holders), None) == dist.get_rank()


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is distributed or flattened, so that one rank may not hold all of its gradient."""
    return getattr(param, "_fsdp_flattened", False) or _is_distributed(param)


def any_distributed(tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors may be distributed, by their types alone, since this runs at every step."""
    return not set(map(type, tensors)) <= PLAIN


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a tensor; None if it is not distributed."""
    if type(tensor) in PLAIN or not _is_distributed(tensor):
        return None
    return Layout(tensor.device_mesh, tuple(tensor.placements))  # type: ignore[attr-defined]


def shard_of(param: Tensor) -> Shard | None:
    """The shard of a parameter on this rank, as a real tensor; None if this rank holds all of it."""
    layout = layout_of(param)
    if layout is None or layout.sharded_dims is None:
        return None
    return layout.shard(torch.Size((*param.shape, 2)) if param.is_complex() else param.shape)


def local(tensor: Tensor) -> Tensor:
    """Return the shard on this rank, in the same memory; a tensor that is not distributed is returned unchanged."""
    if type(tensor) in PLAIN or not _is_distributed(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # the communication may not have ended


def aligned(grad: Tensor, param: Tensor) -> Tensor:
    """Shard a replicated gradient as its parameter is sharded; return any other gradient unchanged."""
    layout, its = layout_of(param), layout_of(grad)
    if layout is None or its is None or its == layout or its.mesh != layout.mesh:
        return grad
    pairs = zip(its.placements, layout.placements, strict=True)
    if not all(placement.is_replicate() or placement == wanted for placement, wanted in pairs):
        return grad
    cut: Tensor = grad.redistribute(placements=layout.placements)  # type: ignore[attr-defined]  # no communication
    return cut


def whole(tensor: Tensor) -> Tensor:
    """Return a distributed tensor as a whole one on the meta device, and any other tensor unchanged."""
    if not _is_distributed(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def part_of(value: Tensor, param: Tensor, dims: Sequence[int], shape: torch.Size) -> Tensor:
    """Return the shard on this rank of a state tensor, which has some dims of its parameter, and this shape.

    Raises:
        ValueError: The state tensor is distributed in another way than its parameter.
    """
    layout, its = layout_of(param), layout_of(value)
    expected = layout.of_dims(dims) if layout else None
    if its is not None:
        if its != expected:
            raise ValueError(
                f"is a DTensor with {its}, where the parameter asks for {expected or 'a plain tensor'}: load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which distributes it anew"
            )
        return local(value)
    if expected is None:
        return value
    if value.shape != shape:
        raise ValueError(f"has shape {tuple(value.shape)}, but the parameter needs {tuple(shape)}, of which each rank "
        "takes its part")  # fmt: skip
    shard = expected.shard(shape)
    return shard.cut(value, ())


def distributed(part: Tensor, param: Tensor, dims: Sequence[int], like: Tensor, old: object) -> Tensor:
    """Return a state tensor that is distributed as its parameter, given its shard on this rank.

    Args:
        part: The shard on this rank.
        param: The parameter; if it is not distributed, neither is the state.
        dims: The dims of the parameter that the state tensor has.
        like: A meta tensor with the shape and strides of the whole state tensor.
        old: A tensor that is returned instead if it has this very shard already.
    """
    layout = layout_of(param)
    if layout is None:
        return part
    from torch.distributed.tensor import DTensor

    if isinstance(old, DTensor) and local(old).data_ptr() == part.data_ptr() and old.dtype == part.dtype:
        return old
    placements = layout.of_dims(dims).placements
    return DTensor.from_local(part, layout.mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def on_host(part: Tensor, param: Tensor) -> Tensor:
    """Return a tensor of the host's memory as the shard of a tensor that is distributed as a parameter is.

    The ranks that hold the other shards add up sums through their process group for the CPU.
    """
    layout = layout_of(param)
    if layout is None:
        return part
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    mesh = layout.mesh
    if mesh.device_type != "cpu":
        if mesh not in _host_meshes:
            _host_meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        mesh = _host_meshes[mesh]
    return DTensor.from_local(part, mesh, layout.placements, run_check=False, shape=param.shape, stride=param.stride())


_host_meshes: WeakKeyDictionary[DeviceMesh, DeviceMesh] = WeakKeyDictionary()
"""Meshes of the same ranks, for tensors in the host's memory."""


def _is_distributed(tensor: Tensor) -> bool:
    return type(tensor) not in PLAIN and hasattr(tensor, "placements")


def _split(placement: Any) -> int:
    """The dim of a tensor that a placement shards, or -1."""
    from torch.distributed.tensor import placement_types

    return placement.dim if isinstance(placement, placement_types.Shard | placement_types._StridedShard) else -1


def _kept(placement: Any, dims: Sequence[int]) -> Any:
    """The placement of a tensor that has only these dims."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    if _split(placement) < 0:
        return placement
    if placement.dim not in dims:
        return Replicate()
    dim = list(dims).index(placement.dim)
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return type(placement)(dim)
