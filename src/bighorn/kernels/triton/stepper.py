"""What the algorithms share: tables of addresses and numbers, and launches for the whole model."""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Any, Generic

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import count_step
from bighorn.kernels.bucket import Bucket, CameOptions, LambOptions, Options, Shard
from bighorn.kernels.reference.stepper import draws
from bighorn.kernels.rounding import kept_for, stream
from bighorn.kernels.triton.device import Launch, capturing, compiled, current_stream, guard, unsupported
from bighorn.kernels.triton.tables import Mirror, in_order_of, keep, table

CHUNK = 8192  # elements of a program

Place = tuple[int, int]
"""The number of a bucket, and of a row in it."""

Layouts = dict[Place, tuple[torch.dtype, bool]]
"""The dtype of each row's gradient, and whether it lies in the order of its parameter."""

ABSENT = -1
"""The address of a gradient that is not there, `ABSENT` of common_kernels.py: an empty tensor's is 0."""


def why_not(param: Tensor, options: LambOptions | CameOptions) -> str | None:
    """Why no algorithm of this backend can serve such a tensor with such options, or None."""
    reason = unsupported(param)
    if options.centre and not reason:
        return "gradient centralisation is not in Triton: it would take one more pass over each gradient"
    return reason


def why_not_shard(shard: Shard, options: LambOptions | CameOptions) -> str | None:
    """Why no algorithm of this backend can serve such a shard of a tensor that it would serve whole, or None."""
    if options.weight_rounding == "stochastic" and len(shard.split - {0}) > 2:
        return "Triton's random bits are for tensors that are cut up along three dims at most"
    return None


def constants_of(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: Options) -> dict[str, Any]:
    """The constants that the kernels of every algorithm have, for dtypes of parameter, gradient and average."""
    from bighorn.kernels.triton.common_kernels import LANES, TYPES

    return {
        **{name: TYPES[dtype] for name, dtype in (("X", x), ("G", g), ("S", m))},
        "ROUNDING": options.weight_rounding,
        "CHUNK": CHUNK,
        "G_BLOCK": LANES.value * 16 // g.itemsize,
    }


class Part(Generic[Options]):
    """Rows that the same compiled kernels serve. An algorithm adds its columns, its tables and its launches."""

    sums: Tensor
    """What a pass sums up for the next one: rows of float64, one for each program."""

    def __init__(
        self, buckets: list[Bucket[Options]], places: list[Place], layouts: Layouts, streams: list[torch.Stream]
    ) -> None:
        from bighorn.kernels.triton import common_kernels

        self.buckets: list[Bucket[Options]] = buckets
        self.places: list[Place] = places
        firsts = list(itertools.accumulate([len(bucket.params) for bucket in buckets], initial=0))
        self.positions = [firsts[index] + i for index, i in places]  # among the rows of all buckets
        self.device, self.common = buckets[0].norms.device, common_kernels
        self.params = [buckets[index].params[i] for index, i in places]
        self.chunks = [
            self.chunks_of(x, buckets[index].options) for (index, _), x in zip(places, self.params, strict=True)
        ]
        self.owners = self.table_of_owners(self.chunks)
        self.rows = table(list(itertools.chain.from_iterable(self._rows())), torch.int64, self.device)
        self.addresses = Mirror(torch.int64, self.device, streams)
        self.strays = [k for k, place in enumerate(places) if not layouts[place][1]]
        self.copies: list[Tensor] = []
        self.launches: dict[tuple[object, ...], Launch] = {}
        self.find_gradients()
        (index, i), x = places[0], self.params[0]
        m = buckets[index].state["exp_avg"][i]
        cut = any(shard.split - {0} for index, _ in places for shard in buckets[index].shards)
        g_dtype = layouts[index, i][0]
        self.constants = {**self.compiled_for(x.dtype, g_dtype, m.dtype, buckets[index].options), "CUT": cut}

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: Options) -> dict[str, Any]:
        """The constants of the kernels, for dtypes of parameter, gradient and average."""
        raise NotImplementedError

    @staticmethod
    def chunks_of(x: Tensor, options: Options) -> int:
        """Programs of a tensor. An empty one has one too: its step is counted and its norms are written."""
        del options
        return max(1, -(-x.numel() // CHUNK))

    def own_columns(self) -> list[list[int]]:
        """The algorithm's columns in the table of rows."""
        raise NotImplementedError

    def step(self, hyper: Tensor, scale: Tensor, commit: Tensor, *, compile_only: bool = False) -> None:
        """One step."""
        raise NotImplementedError

    def holders(self) -> list[object]:
        """Whose attributes its tables are."""
        return [self, self.addresses]

    def find_gradients(self) -> None:
        """Where this step's gradients lie, in the order of their parameters, goes to the device if it is news there."""
        grads = self.gradients()
        self.copies = []
        for k in self.strays:
            if (g := grads[k]) is not None:
                grads[k] = copy = in_order_of(self.params[k], g)
                self.copies.append(copy)
        self.missing = any(g is None for g in grads)
        self.grads = self.addresses.of(addresses_or_absent(grads))

    def square_sums(self) -> Tensor:
        """The sum of the gradients' squares for each chunk, float64: compiled where somebody asks for it."""
        sums = torch.empty(len(self.owners), dtype=torch.float64, device=self.device)
        tables = self.rows, self.grads, self.owners, sums
        self.launch(self.common.square_sums, len(self.owners), tables, compile_only=False)
        return sums

    def shard_totals(self, commit: Tensor, first: int, stop: int, stride: int, compile_only: bool) -> Tensor:
        """The totals of the first two columns of each row's `sums`, flat; arguments as those of the kernel."""
        totals = torch.zeros(2 * len(self.places), dtype=torch.float64, device=self.device)
        columns = {"FIRST_SUM": first, "STOP_SUM": stop, "STRIDE": stride}
        tables = self.rows, self.grads, commit, self.sums, totals
        self.launch(self.common.shard_totals, len(self.places), tables, compile_only, **columns)
        return totals

    def launch(
        self, kernel: Any, programs: int, tables: tuple[Tensor, ...], compile_only: bool, **constants: Any
    ) -> None:
        """Launch so many programs of a kernel, if any, which is compiled and loaded first; or do no more than that."""
        keep(*tables)
        key = kernel, *constants.items()
        if programs and key not in self.launches:
            self.launches[key] = compiled(kernel, tables, {**self.constants, **constants})
        if programs and not compile_only:
            self.launches[key](programs, tables)

    def gradients(self) -> list[Tensor | None]:
        """Each row's gradient, as it is."""
        grads = list(itertools.chain.from_iterable([bucket.grads for bucket in self.buckets]))
        return list(map(grads.__getitem__, self.positions))

    def table_of_owners(self, programs: list[int]) -> Tensor:
        """For each program its row, where each row has so many programs."""
        return table([row for row, count in enumerate(programs) for _ in range(count)], torch.int32, self.device)

    def _rows(self) -> list[list[int]]:
        """The table of rows, as `common_kernels.py` numbers its columns."""
        rows: list[list[int]] = []
        counted: set[int] = set()
        first, width = 0, self.common.ROW.value
        for (index, i), own, programs in zip(self.places, self.own_columns(), self.chunks, strict=True):
            bucket = self.buckets[index]
            x, m, step = bucket.params[i], bucket.state["exp_avg"][i], bucket.steps[i].data_ptr()
            stop = first + programs
            row = [x.numel(), first, stop, x.data_ptr(), m.data_ptr(), step, bucket.norms[i].data_ptr()]
            row += step not in counted, index
            row.append(sum(bucket.state[name][i].data_ptr() for name in kept_for(bucket.options.weight_rounding)))
            row.append(max(1, math.prod(x.shape[1:])))
            row += random_columns(bucket, i) if draws(bucket) else [0] * 6
            row += own
            rows.append(row + [0] * (width - len(row)))
            counted.add(step)
            first = stop
        return rows


class Stepper(Generic[Options]):
    """An algorithm for some buckets on one device."""

    def __init__(self, buckets: list[Bucket[Options]]) -> None:
        self.buckets: list[Bucket[Options]] = buckets
        self.device = buckets[0].norms.device
        self.streams: list[torch.Stream] = []
        """Those that steps have been launched on: a table that is freed waits for all of them."""
        self.hyper = Mirror(torch.float64, self.device, self.streams)
        self.one = torch.ones((), dtype=torch.float64, device=self.device)
        self.true = torch.ones((), dtype=torch.bool, device=self.device)
        self.none = torch.empty(0, dtype=torch.float64, device=self.device)
        served = {step.data_ptr() for bucket in buckets for step in bucket.steps}
        # A stacked parameter without slices has no row, but steps like any other.
        self.rowless = [
            (bucket, step) for bucket in self.buckets for step in bucket.counts if step.data_ptr() not in served
        ]
        # Of gradients that are all there now, while some may be missing when tables are made anew.
        self.layouts: Layouts = {
            (index, i): (g.dtype, in_order_of(x, g) is g)
            for index, bucket in enumerate(buckets)
            for i, (x, g) in enumerate(zip(bucket.params, bucket.grads, strict=True))
            if g is not None
        }
        self.lay_out()

    def part(self, places: list[Place]) -> Part[Options]:
        """Rows that are of one kind."""
        raise NotImplementedError

    @staticmethod
    def kind(bucket: Bucket[Options], i: int) -> tuple[object, ...]:
        """What rows must agree in, besides dtypes, to be served by the same compiled kernels."""
        raise NotImplementedError

    @staticmethod
    def numbers(options: Options) -> list[float]:
        """A row of the table of hyper-parameters: `common_kernels.py` numbers its first columns."""
        raise NotImplementedError

    def lay_out(self) -> None:
        """Sort the rows into parts, and compile what they need, so that no kernel fails after another has written."""
        self.laid = [self.laid_by(bucket.options) for bucket in self.buckets]
        self.streams.clear()
        with guard(self.device):
            self.parts: list[Part[Options]] = list(map(self.part, self._alike()))
            hyper = self._hyper()
            for part in self.parts:
                part.step(hyper, self.one, self.true, compile_only=True)

    @staticmethod
    def laid_by(options: Options) -> tuple[object, ...]:
        """What the layout hangs on besides tensors."""
        return (options.rounding_seed,)

    def prepare(self) -> None:
        """Whatever can fail: memory, and copies of gradients that lie in another order than their parameters."""
        if self.laid != [self.laid_by(bucket.options) for bucket in self.buckets]:
            self.lay_out()
        self.meet_stream()
        with guard(self.device):
            for part in self.parts:
                part.find_gradients()

    def meet_stream(self) -> None:
        """Keep the memory of tables, once freed, from others until the current stream has done with it, too."""
        stream = current_stream(self.device)
        if stream is None or stream in self.streams or capturing(self.device):
            return
        self.streams.append(stream)
        for holder in (self, self.hyper, *itertools.chain.from_iterable(part.holders() for part in self.parts)):
            for held in vars(holder).values():
                if isinstance(held, Tensor):
                    held.record_stream(stream)

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, a 0-dim float64 tensor."""
        with guard(self.device):
            return torch.cat([self.none, *(part.square_sums() for part in self.parts)]).sum()

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One step of all buckets, as `reference.Stepper.step`."""
        with guard(self.device):
            hyper, scale, commit = self.on_device(grad_scale, commit)
            for part in self.parts:
                part.step(hyper, scale, commit)
            self.finish(commit)

    def on_device(self, grad_scale: Tensor | float, commit: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Options, what gradients are multiplied with, and whether anything is written, all on the device."""
        keep(self.one, self.true)
        if not isinstance(grad_scale, Tensor):
            grad_scale = self.one if grad_scale == 1 else self.one * grad_scale
        hyper = self._hyper()
        for row, bucket in zip(hyper.view(len(self.buckets), -1), self.buckets, strict=True):
            if isinstance(bucket.options.lr, Tensor):
                row[0].copy_(bucket.options.lr)
        return hyper, grad_scale.to(torch.float64), self.true if commit is None else commit

    def finish(self, commit: Tensor) -> None:
        """Let go of copies of gradients, and count the steps that no kernel counts."""
        for part in self.parts:
            part.copies = []
        count_step([step for bucket, step in self.rowless if any(step is each for each in bucket.counts)], commit)

    def _hyper(self) -> Tensor:
        return self.hyper.of([number for bucket in self.buckets for number in self._row(bucket.options)])

    def _row(self, o: Options) -> list[float]:
        from bighorn.kernels.triton.common_kernels import OPTION

        # A learning rate that is a tensor is copied there, device to device.
        common = [0.0 if isinstance(o.lr, Tensor) else o.lr, -1.0 if o.maximize else 1.0, o.weight_decay]
        row = common + self.numbers(o)
        return row + [0.0] * (OPTION.value - len(row))

    def _alike(self) -> list[list[Place]]:
        """The rows of all buckets, sorted by what kernels are compiled for."""
        parts: dict[tuple[object, ...], list[Place]] = {}
        for index, bucket in enumerate(self.buckets):
            for i, x in enumerate(bucket.params):
                key = x.dtype, self.layouts[index, i][0], bucket.state["exp_avg"][i].dtype, self.kind(bucket, i)
                parts.setdefault(key, []).append((index, i))
        return list(parts.values())


def addresses_or_absent(grads: list[Tensor | None]) -> array[int]:
    """Where gradients lie."""
    there = [g for g in grads if g is not None]
    found = addresses(there)
    if len(there) == len(grads):
        return found
    each = iter(found)
    return array("q", [ABSENT if g is None else next(each) for g in grads])


def random_columns(bucket: Bucket[Any], i: int) -> list[int]:
    """What a row's random bits are made from, and the places of its elements in the whole parameter."""
    shard = bucket.shards[i] if bucket.shards else Shard.whole(tuple(bucket.params[i].shape))
    strides = [math.prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape))]
    first = bucket.firsts[i] + sum(map(math.prod, zip(shard.offset, strides, strict=True)))
    key = stream(bucket.options.rounding_seed, bucket.numbers[i])
    runs = [(1, 1)]  # how many, and how far apart; from the innermost on
    for size, stride in reversed(list(zip(shard.size, strides, strict=True))):
        count, step = runs[-1]
        if size != 1 and stride == count * step:
            runs[-1] = count * size, step
        elif size != 1:
            runs.append((size, stride))
    (run, _), (count, step), (_, far) = (*runs, (1, 0), (1, 0))[:3]
    return [key, first, max(1, run), max(1, count), step, far]
