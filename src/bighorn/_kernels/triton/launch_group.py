"""Slots that the same compiled kernels serve: their tables and launches, for the whole model at once."""

from __future__ import annotations

import itertools
import math
import operator
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from bighorn._kernels import codec
from bighorn._kernels.bucket import Bucket, Shard
from bighorn._kernels.options import Options
from bighorn._kernels.reference.stepper import needs_rng_key
from bighorn._kernels.rounding import rng_key
from bighorn._kernels.triton.device import Launch, compiled
from bighorn._kernels.triton.tables import ABSENT, CachedTable, Uploads, keep_alive

CHUNK = 8192  # elements per program

SOURCES = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
"""A number for this version of the kernels and of the layouts of their tables, which every kernel gets as a constant.

Triton's cache on disk ignores the constants that a kernel finds in another module and, in 3.3, in its own. Without this
number, kernels with the columns and sizes of an older version would run after an update.
"""

SlotIndex = tuple[int, int]
"""The index of a bucket, and the index of a slot in it."""

GradDtypes = dict[SlotIndex, torch.dtype]
"""The dtype of each slot's gradient."""

Tables = Callable[[object], tuple[Tensor, ...]]
"""A function that takes a kernel's tables from its launch group."""


def constants_of(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: Options) -> dict[str, Any]:
    """Return the constants of the kernels of every algorithm, for dtypes of parameter, gradient and average."""
    from bighorn._kernels.triton.common_kernels import LANES, TYPES

    return {
        **{name: TYPES[dtype] for name, dtype in (("X", x), ("G", g), ("S", m))},
        "ROUNDING": options.weight_rounding,
        "CHUNK": CHUNK,
        "G_BLOCK": LANES.value * 16 // g.itemsize,
    }


class LaunchGroup(Generic[Options]):
    """Slots that the same compiled kernels serve. An algorithm adds its columns, tables and launches."""

    params: list[Tensor]
    layout: Any
    """The module with the algorithm's columns in the table of slots, which has the addresses of state tensors."""
    sums: Tensor
    """The sums of a pass for the next one, float64, by program."""
    options: Tensor
    scale: Tensor
    apply_mask: Tensor
    compile_only: bool
    """The arguments of the current step."""

    def __init__(
        self, buckets: list[Bucket[Options]], indices: list[SlotIndex], dtypes: GradDtypes, uploads: Uploads
    ) -> None:
        from bighorn._kernels.triton import columns, common_kernels

        self.buckets: list[Bucket[Options]] = buckets
        self.indices, self.uploads = indices, uploads
        offsets = list(itertools.accumulate([len(bucket.params) for bucket in buckets], initial=0))
        self.flat_indices = [offsets[index] + i for index, i in indices]  # indices among the slots of all buckets
        self.device = buckets[0].metrics.device
        self.common, self.columns = common_kernels, columns
        self.params = [buckets[index].params[i] for index, i in indices]
        self.chunks = [
            self.chunks_of(x, buckets[index].options) for (index, _), x in zip(indices, self.params, strict=True)
        ]
        self.program_to_slot = self.program_table(self.chunks)
        self.slots = uploads.table(list(itertools.chain.from_iterable(self._slots())), torch.int64)
        self.addresses = CachedTable(torch.int64, uploads)
        self.launches: dict[tuple[object, ...], tuple[Launch, int, Tables]] = {}
        self.update_gradients()
        (index, i), x = indices[0], self.params[0]
        m = buckets[index].first_moment(i)
        cut = any(shard.split - {0} for index, _ in indices for shard in buckets[index].shards)
        self.constants = {
            **self.compiled_for(x.dtype, dtypes[index, i], m.dtype, buckets[index].options),
            "CUT": cut,
            "_SOURCES": SOURCES,  # no kernel reads it
        }

    def refresh(self) -> None:
        """Update the tables, after parameters have moved."""
        self.params = [self.buckets[index].params[i] for index, i in self.indices]
        slots = self.slots.clone()  # launches in other streams, and graphs, may still read the old table
        addresses = self.uploads.table([x.data_ptr() for x in self.params], torch.int64)
        slots.view(len(self.params), -1)[:, self.columns.slot.PARAM.value] = addresses
        self.slots = slots

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: Options) -> dict[str, Any]:
        """Return the constants of the kernels, for dtypes of parameter, gradient and average."""
        raise NotImplementedError

    @staticmethod
    def chunks_of(x: Tensor, options: Options) -> int:
        """Return the programs of a tensor; blocks of codes count as full ones.

        An empty tensor has one, too, which counts its step and writes its metrics.
        """
        size = math.prod(codec.scales_shape(x.shape)) * codec.BLOCK if options.blocks else x.numel()
        return max(1, -(-size // CHUNK))

    def algorithm_columns(self) -> list[dict[str, int]]:
        """Return the values of the algorithm's columns in the table of slots, by their names."""
        return [{} for _ in self.indices]

    def step(self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False) -> None:
        """Make one step, or compile the kernels only; without other ranks, all sums are complete."""
        for _ in self.sharded_step(options, scale, apply_mask, compile_only=compile_only):
            pass

    def sharded_step(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False
    ) -> Iterator[Tensor]:
        """Make one step of shards; it yields sums, which must be added up over all ranks, in place, to continue."""
        raise NotImplementedError

    def holders(self) -> list[object]:
        """Return the objects whose attributes are this group's tables."""
        return [self, self.addresses]

    def update_gradients(self) -> None:
        """Upload the addresses of this step's gradients, in the order of their parameters, if they have changed."""
        each = [b.grad_addresses if b.grad_addresses[0] is b.grads else b.read_addresses() for b in self.buckets]
        grads, addresses = (list(itertools.chain.from_iterable(lists)) for lists in zip(*each, strict=True))
        grads, addresses = (list(map(values.__getitem__, self.flat_indices)) for values in (grads, addresses))
        self.missing = 0 in addresses and type(None) in set(map(type, grads))
        if self.missing:
            addresses = [ABSENT if g is None else address for g, address in zip(grads, addresses, strict=True)]
        self.grads = self.addresses.of(array("q", addresses))

    def square_sums(self) -> Tensor:
        """Return the sum of the gradients' squares for each chunk, float64; the first call compiles the kernel."""
        self.squares = torch.empty(self.program_to_slot.numel(), dtype=torch.float64, device=self.device)
        self.compile_only = False
        self.launch(self.common.square_sums)
        return self.squares

    def shard_totals(self, first: int, stop: int, stride: int, columns: int) -> Tensor:
        """Return the totals of the first columns of each slot's `sums`, flat; arguments are as for the kernel."""
        self.totals = torch.zeros(columns * len(self.indices), dtype=torch.float64, device=self.device)
        constants = {"FIRST_SUM": first, "STOP_SUM": stop, "STRIDE": stride, "COLUMNS": columns}
        self.launch(self.common.shard_totals, **constants)
        return self.totals

    def launch(self, kernel: Any, **constants: Any) -> None:
        """Compile and load a kernel at first, and launch it unless only compilation is asked for.

        Its tables are the attributes that its arguments name. It has one program for each entry of the one that maps
        programs to slots, or else one for each slot.
        """
        key = id(kernel), *constants.items()  # the hash of a kernel looks at its sources
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = self._compiled(kernel, constants)
        launch, programs, tables_of = found
        tables = tables_of(self)
        if self.uploads.recording:
            keep_alive(tables)
        if programs and not self.compile_only:
            launch(programs, tables)

    def _compiled(self, kernel: Any, constants: dict[str, Any]) -> tuple[Launch, int, Tables]:
        names = [name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")]
        tables_of: Tables = operator.attrgetter(*names)
        maps = [getattr(self, name) for name in names if name.endswith("_to_slot")]
        programs = maps[0].numel() if maps else len(self.indices)
        if not programs:
            return lambda *_: None, programs, tables_of
        return compiled(kernel, tables_of(self), {**self.constants, **constants}), programs, tables_of

    def program_table(self, programs: list[int]) -> Tensor:
        """Return the slot of each program, from the number of programs of each slot."""
        return self.uploads.table([slot for slot, count in enumerate(programs) for _ in range(count)], torch.int32)

    def _slots(self) -> list[list[int]]:
        slots: list[list[int]] = []
        unique_steps: set[int] = set()
        first = 0
        for (index, i), values, programs in zip(self.indices, self.algorithm_columns(), self.chunks, strict=True):
            bucket = self.buckets[index]
            x, addresses = bucket.params[i], bucket.addresses(i)
            step = addresses["step"]
            slots.append(
                self.layout.slot.pack(
                    SIZE=x.numel(),
                    FIRST=first,
                    STOP=first + programs,
                    PARAM=x.data_ptr(),
                    EXP_AVG=addresses[str(bucket.options.first_moment)],
                    STEP=step,
                    NORMS=addresses["metrics"],
                    COUNTS=step not in unique_steps,
                    HYPER=index,
                    AUX=addresses["aux"],
                    INNER=max(1, math.prod(x.shape[1:])),
                    **{column: addresses.get(name, 0) for column, name in self.layout.ADDRESSES.items()},
                    **random_columns(bucket, i),
                    **values,
                )
            )
            unique_steps.add(step)
            first += programs
        return slots


def shard_of(bucket: Bucket[Any], i: int) -> Shard:
    """Return the shard of a slot."""
    return bucket.shards[i] if bucket.shards else Shard.whole(tuple(bucket.params[i].shape))


def random_columns(bucket: Bucket[Any], i: int) -> dict[str, int]:
    """Return the key of a slot's random bits, and the positions of its elements in the whole parameter; 0 without."""
    if not needs_rng_key(bucket):
        return dict.fromkeys(("KEY", "POSITION", "RUN", "RUNS", "RUN_STEP", "RUNS_STEP"), 0)
    key = rng_key(bucket.options.rounding_seed, bucket.param_ids[i])
    (run, _), (count, step), (_, far) = (*shard_of(bucket, i).runs, (1, 0), (1, 0))[:3]
    sizes = {"RUN": max(1, run), "RUNS": max(1, count), "RUN_STEP": step, "RUNS_STEP": far}
    return {"KEY": key, "POSITION": bucket.first_position(i), **sizes}
