"""CAME's shards in Triton: the kernels of whole tensors, with sums over all ranks between them.

`Averages` in `reference/came.py` defines the sums, and why they are few. Kernels store the averages of rows and columns
as lines, end to end. The arithmetic on lines, for all tensors at once, is plain torch in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bighorn._kernels.bucket import Bucket, Shard, matrix_shape, row_axis
from bighorn._kernels.options import CameOptions, Factor
from bighorn._kernels.triton.came_launches import CameLaunchGroup
from bighorn._kernels.triton.launch_group import GradDtypes, LaunchGroup, SlotIndex
from bighorn._kernels.triton.tables import ABSENT, Uploads
from bighorn._kernels.triton.tiles import TileGrid

Split = Literal["none", "rows", "columns", "both"]


def split_of(shard: Shard, factor: Factor | None) -> Split:
    """Return which lines of a matrix are split over ranks; averages of the other lines are then sums over shards."""
    axis = row_axis(len(shard.shape), factor)
    rows, columns = shard.splits([axis]), shard.splits(range(axis + 1, len(shard.shape)))
    if factor is None or not (rows or columns):
        return "none"
    return "both" if rows and columns else "rows" if rows else "columns"


@dataclass
class Lines:
    """The rows, or the columns, of all matrices of a launch group.

    Attributes:
        indices: Their indices among the lines that kernels write.
        positions: Their positions among the lines of all ranks.
        per_matrix: The number of lines that each matrix has on this rank.
        in_all: The number of lines that each matrix has on all ranks.
        size: The number of lines on all ranks.
        present: Which of this rank's lines belong to tensors with a gradient; None if all do.
    """

    indices: Tensor
    positions: Tensor
    per_matrix: Tensor
    in_all: Tensor
    size: int
    present: Tensor | None = None

    def spread(self, lines: Tensor) -> Tensor:
        """Return lines at their positions among all ranks' lines, with 0 for the lines of other ranks."""
        return lines.new_zeros(self.size).index_copy_(0, self.positions, where(self.present, lines[self.indices]))

    def take(self, lines: Tensor, whole: Tensor) -> None:
        """Copy this rank's lines from all ranks' lines."""
        lines[self.indices] = whole[self.positions]

    def matrix_sums(self, lines: Tensor) -> Tensor:
        """Return the sum over each matrix's lines."""
        return segment_sums(lines[self.indices], self.per_matrix)


class CameShardLaunchGroup(CameLaunchGroup):
    """Shards of tensors whose matrices are all split in the same way."""

    def __init__(
        self, buckets: list[Bucket[CameOptions]], indices: list[SlotIndex], dtypes: GradDtypes, uploads: Uploads
    ) -> None:
        from bighorn._kernels.triton import came_shard_kernels

        super().__init__(buckets, indices, dtypes, uploads)
        self.shard_kernels = came_shard_kernels
        (index, i), device = indices[0], self.device
        self.factor = buckets[index].options.factor
        self.split = split_of(self.shard(index, i), self.factor)
        self.constants = {**self.constants, "SPLIT": self.split}
        self.sums.zero_()
        self.whole_sums = torch.zeros(len(indices), self.layout.SUM.value, dtype=torch.float64, device=device)
        if self.factored:
            shards = [self.shard(*index) for index in indices]
            self.lines = torch.zeros(sum(each.lines for each in self.grids), dtype=torch.float64, device=device)
            self.inner = torch.zeros_like(self.lines)
            self.by_row, self.by_col = (self._lines(self.grids, shards, of_rows) for of_rows in (True, False))
            counts = [self._whole(shard)[0] for shard in shards]
            firsts = itertools.accumulate(counts[:-1], initial=0)
            positions = [each.positions_along(range(row_axis(len(each.shape), self.factor))) for each in shards]
            self.matrices = torch.cat([first + each for first, each in zip(firsts, positions, strict=True)]).to(device)
            self.matrices_per_slot = uploads.table(counts, torch.int64)
            self.matrix_to_slot = self.program_table([each.count for each in self.grids])

    def holders(self) -> list[object]:
        """See `LaunchGroup.holders`."""
        return [*super().holders(), *([self.by_row, self.by_col] if self.factored else [])]

    def sharded_step(
        self, options: Tensor, scale: Tensor, apply_mask: Tensor, *, compile_only: bool = False
    ) -> Iterator[Tensor]:
        """Make one step; it yields sums, which must be added up over all ranks, in place, before it continues."""
        self.options, self.scale, self.apply_mask, self.compile_only = options, scale, apply_mask, compile_only
        if self.factored:
            self.find_present()
            self.launch(self.kernels.came_squares, AVERAGED="")
            self.launch(self.kernels.came_lines, RESIDUAL=False)
            u_sums, x_sums = yield from self.update_sums()
        else:
            self.launch(self.unfactored_kernels.came_second_moment)
            u_sums, x_sums = yield from added_up(*self.sums_of_tiles())
        self.whole_sums[:, self.layout.U_SQUARES.value] = u_sums
        self.whole_sums[:, self.layout.X_SQUARES.value] = x_sums
        self.launch(self.kernels.came_totals)
        if self.factored:
            self.launch(self.kernels.came_average)
            self.launch(self.kernels.came_lines, RESIDUAL=True)
            self.whole_sums[:, self.layout.CONFIDENCES.value] = yield from self.confidence_sums()
            self.launch(self.kernels.came_apply)
        else:
            self.launch(self.unfactored_kernels.came_move)
        self.launch(self.kernels.came_metrics)

    step = LaunchGroup.step

    def find_present(self) -> None:
        """Find the matrices and lines of tensors with a gradient; other lines have values of an earlier step."""
        present = self.present = (self.grads != ABSENT)[self.matrix_to_slot] if self.missing else None
        for lines in (self.by_row, self.by_col):
            lines.present = None
            if present is not None:
                lines.present = present.repeat_interleave(lines.per_matrix, output_size=len(lines.indices))

    def update_sums(self) -> Generator[Tensor, None, tuple[Tensor, Tensor]]:
        """Return the sums of u^2 and x^2 over each tensor, and add up the averages of squares over all ranks."""
        if self.split in ("rows", "columns"):
            self.launch(self.kernels.came_squares, AVERAGED=self.split)
            self.launch(self.shard_kernels.came_line_sums)
            inner = self.split_lines.spread(self.inner)
            inner, lines, mean, x_sums = yield from self.one_whole(inner, self.sums_of_tiles()[1], residual=False)
            return self.over_matrices(mean * segment_sums(inner / lines, self.split_lines.in_all)), x_sums
        yield from self.both_whole(residual=False)
        self.launch(self.kernels.came_update_squares)
        u_sums, x_sums = yield from added_up(*self.sums_of_tiles())
        return u_sums, x_sums

    def confidence_sums(self) -> Generator[Tensor, None, Tensor]:
        """Return the sums of 1 / sqrt of the residuals' averages over each tensor; add up the averages over ranks."""
        if self.split in ("rows", "columns"):
            inner = self.spread(self.whole_lines.matrix_sums(self.lines.rsqrt()))
            inner, lines, mean = yield from self.one_whole(inner, residual=True)
            return self.over_matrices(mean.sqrt() * inner * segment_sums(lines.rsqrt(), self.split_lines.in_all))
        whole = yield from self.both_whole(residual=True)
        if whole is not None:
            (row, col), mean = whole
            inner = segment_sums(row.rsqrt(), self.by_row.in_all)
            return self.over_matrices(mean.sqrt() * inner * segment_sums(col.rsqrt(), self.by_col.in_all))
        rsqrt, mean = self.lines.rsqrt(), self.local_mean()
        inner = mean.sqrt() * self.by_row.matrix_sums(rsqrt) * self.by_col.matrix_sums(rsqrt)
        (sums,) = yield from added_up(self.over_matrices(self.spread(inner)), dtype=torch.float32)
        return sums

    def one_whole(self, inner: Tensor, *also: Tensor, residual: bool) -> Generator[Tensor, None, tuple[Tensor, ...]]:
        """Add up `inner`, the averages that are split, and `also`; return them, with the means of rows in between."""
        line_sums = self.spread(self.whole_lines.matrix_sums(self.lines))
        dtype = torch.float32 if residual else torch.float64
        sent = inner, self.split_lines.spread(self.lines), line_sums, *also
        inner, lines, total, *rest = yield from added_up(*sent, dtype=dtype)
        total = total if self.split == "rows" else segment_sums(lines, self.by_row.in_all)
        self.settle([self.split_lines], [lines], total / self.by_row.in_all, residual)
        return inner, lines, total / self.by_row.in_all, *rest

    def both_whole(self, residual: bool) -> Generator[Tensor, None, tuple[tuple[Tensor, Tensor], Tensor] | None]:
        """Add up all averages if both dims are split; return them and the means of rows."""
        if self.split == "none":
            self.roots.copy_(self.local_mean().sqrt())
            return None
        sent = self.by_row.spread(self.lines), self.by_col.spread(self.lines)
        row, col = yield from added_up(*sent, dtype=torch.float32)
        mean = segment_sums(row, self.by_row.in_all) / self.by_row.in_all
        self.settle([self.by_row, self.by_col], [row, col], mean, residual)
        return (row, col), mean

    def settle(self, which: list[Lines], whole: list[Tensor], mean: Tensor, residual: bool) -> None:
        """Store averages that are complete, and the roots of the means of rows."""
        for lines, values in zip(which, whole, strict=True):
            lines.take(self.lines, values)
        self.roots.copy_(mean[self.matrices].sqrt())
        self.launch(self.shard_kernels.came_settle, RESIDUAL=residual)

    @property
    def split_lines(self) -> Lines:
        """The lines whose averages are split, if one of the two dims is split."""
        return self.by_col if self.split == "rows" else self.by_row

    @property
    def whole_lines(self) -> Lines:
        """The lines whose averages are not split."""
        return self.by_row if self.split == "rows" else self.by_col

    def local_mean(self) -> Tensor:
        """Return the mean of the row averages of each matrix, which must be whole on this rank."""
        return self.by_row.matrix_sums(self.lines) / self.by_row.per_matrix.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Return one number per matrix at the matrix's position among all ranks' matrices."""
        return values.new_zeros(len(self.by_row.in_all)).index_copy_(0, self.matrices, where(self.present, values))

    def over_matrices(self, values: Tensor) -> Tensor:
        """Return sums over the matrices of each tensor."""
        return segment_sums(values, self.matrices_per_slot)

    def sums_of_tiles(self) -> tuple[Tensor, Tensor]:
        """Return the sums of u^2 and x^2 over this rank's shard of each tensor."""
        first, stop, stride = self.layout.slot.FIRST_TILE, self.layout.slot.STOP_TILE, self.layout.SUM
        totals = self.shard_totals(first.value, stop.value, stride.value, 2)
        return totals[self.layout.U_SQUARES.value :: 2], totals[self.layout.X_SQUARES.value :: 2]

    # ---- tables ----------------------------------------------------------------------------------------------------

    def shard(self, index: int, i: int) -> Shard:
        """Return the shard of a slot."""
        return self.buckets[index].shards[i]

    def whole_columns(self, index: int, i: int, each: TileGrid) -> dict[str, int]:
        """See `CameLaunchGroup.whole_columns`."""
        del each
        shard, factor = self.shard(index, i), self.buckets[index].options.factor
        axis = row_axis(len(shard.shape), factor)
        _, height, width = matrix_shape(torch.Size(shard.shape), factor)
        sizes = {"NUMEL": shard.numel, "WHOLE_HEIGHT": height, "WHOLE_WIDTH": width}
        leads = shard.leads(range(axis + 1, len(shard.shape))), shard.leads([axis])
        return {**sizes, "LEADS_ROWS": leads[0], "LEADS_COLS": leads[1]}

    def _whole(self, shard: Shard) -> tuple[int, int, int]:
        return matrix_shape(torch.Size(shard.shape), self.factor)

    def _lines(self, grids: list[TileGrid], shards: list[Shard], of_rows: bool) -> Lines:
        indices, positions, per_matrix, in_all = [], [], [], []
        start = first = 0
        for (index, i), shard, each in zip(self.indices, shards, grids, strict=True):
            count, height, width = self._whole(shard)
            local, length = (each.height, height) if of_rows else (each.width, width)
            dims, axis = range(len(shard.shape)), row_axis(len(shard.shape), self.factor)
            along = dims[: axis + 1] if of_rows else (*dims[:axis], *dims[axis + 1 :])
            average = self.buckets[index].state[f"exp_avg_sq_{'row' if of_rows else 'col'}"][i]
            line = start + (0 if of_rows else each.count * each.height)
            indices.append(torch.arange(line, line + each.count * local))
            positions.append(first + shard.positions_along(along, average))
            per_matrix += [local] * each.count
            in_all += [length] * count
            start, first = start + each.lines, first + count * length
        return Lines(
            torch.cat(indices).to(self.device),
            torch.cat(positions).to(self.device),
            self.uploads.table(per_matrix, torch.int64),
            self.uploads.table(in_all, torch.int64),
            first,
        )


def where(present: Tensor | None, values: Tensor) -> Tensor:
    """Return values, with 0 for tensors without a gradient."""
    return values if present is None else torch.where(present, values, 0.0)


def added_up(*parts: Tensor, dtype: torch.dtype = torch.float64) -> Generator[Tensor, None, tuple[Tensor, ...]]:
    """Yield tensors as one, of a dtype, and return the values that it has afterwards, in float64."""
    sums = torch.cat([part.reshape(-1) for part in parts]).to(dtype)
    yield sums
    return torch.split(sums.double(), [part.numel() for part in parts])


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return sums over consecutive groups of values, whose sizes are given; always in the same order."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
