"""CAME in Triton, the host's side: seven launches for the factored tensors of a model, three for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.bucket import Bucket, CameOptions
from bighorn.kernels.triton import stepper
from bighorn.kernels.triton.stepper import CHUNK, Part, Place, Stepper
from bighorn.kernels.triton.tiles import Cut, cut

SMALL = 1024
"""Elements of a small matrix."""

MOST_SMALL = 4096
"""So many small matrices of a tensor have programs of their own."""


def why_not(param: Tensor, options: CameOptions) -> str | None:
    """Why this backend cannot serve such a tensor, or None."""
    reason = stepper.why_not(param, options)
    if reason or options.factor is None:
        return reason
    shape = cut(param.shape, options.factor)
    if shape.count > MOST_SMALL and shape.height * shape.width < SMALL:
        return f"{shape.count} matrices of {shape.height} x {shape.width} are too many and too small for Triton"
    return None


class CamePart(Part[CameOptions]):
    """Rows that are all factored, or none is."""

    def __init__(self, buckets: list[Bucket[CameOptions]], places: list[Place]) -> None:
        from bighorn.kernels.triton import came_kernels

        self.kernels = came_kernels
        super().__init__(buckets, places)
        cuts, device = self.cuts(), self.device
        self.factored = factored = self.constants["FACTORED"]
        coded = "exp_avg_scale" in buckets[places[0][0]].state
        self.tiles = self.table_of_owners([each.tiles for each in cuts]) if factored else self.owners
        self.pieces = self.table_of_owners([each.pieces for each in cuts if factored])
        self.packs = self.table_of_owners([each.packs for each in cuts if coded])
        partials = sum(each.row_parts + each.col_parts for each in cuts if factored)
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.roots = torch.empty(sum(each.count for each in cuts if factored), dtype=torch.float32, device=device)
        self.line_sums = torch.empty(len(self.pieces), dtype=torch.float64, device=device)
        self.sums = torch.empty(came_kernels.SUM.value * len(self.tiles), dtype=torch.float64, device=device)

    @staticmethod
    def kind(options: CameOptions) -> tuple[object, ...]:
        """As `Part.kind`."""
        return (options.factor is None,)

    @staticmethod
    def compiled_for(x: torch.dtype, g: torch.dtype, m: torch.dtype, options: CameOptions) -> dict[str, Any]:
        """As `Part.compiled_for`; the statistics are float32."""
        from bighorn.kernels.triton.common_kernels import LANES, TYPES

        return {
            **{name: TYPES[dtype] for name, dtype in (("X", x), ("G", g), ("S", m))},
            "FACTORED": options.factor is not None,
            "VECTOR": 16 // min(dtype.itemsize for dtype in (x, g, m)),
            "CHUNK": CHUNK,
            "BLOCK": LANES.value * 4,  # a thread moves 16 bytes of float32, which the second moment is
        }

    def cuts(self) -> list[Cut]:
        """How each row is cut up."""
        return [
            cut(self.buckets[index].params[i].shape, self.buckets[index].options.factor) for index, i in self.places
        ]

    def own_columns(self) -> list[list[int]]:
        """As `Part.own_columns`: `came_kernels.py` numbers them."""
        columns: list[list[int]] = []
        tile = piece = matrix = part = pack = 0
        for (index, i), x, each in zip(self.places, self.params, self.cuts(), strict=True):
            state, factored = self.buckets[index].state, self.buckets[index].options.factor is not None
            addresses = [state[name][i].data_ptr() if name in state else 0 for name in self.kernels.ADDRESSES]
            tiles = each.tiles if factored else stepper.chunks(x)
            parts = [part, part + each.row_parts]
            shape = [each.height, each.width, each.count, each.inner]
            columns.append([*addresses, *shape, tile, tile + tiles, piece, matrix, *parts, pack])
            tile, piece, matrix = tile + tiles, piece + each.pieces, matrix + each.count
            part, pack = parts[1] + each.col_parts, pack + each.packs
        return columns

    def step(self, hyper: Tensor, scale: Tensor, commit: Tensor, *, compile_only: bool = False) -> None:
        """One CAME step: the second moment and the size of u, then the average with its residual, then x."""

        def run(kernel: Any, programs: int, *tables: Tensor, **constants: Any) -> None:
            self.launch(kernel, programs, tables, compile_only, **constants)

        kernels, rows, sums, tiles = self.kernels, self.rows, self.sums, len(self.tiles)
        given = self.grads, self.tiles, hyper, scale, commit
        averaged = rows, self.pieces, hyper, commit, self.partials, self.line_sums
        if self.factored:
            run(kernels.came_squares, tiles, rows, *given, self.partials, sums)
            run(kernels.came_lines, len(self.pieces), *averaged, RESIDUAL=False)
            run(kernels.came_update_squares, tiles, rows, *given, self.line_sums, self.roots, sums)
        else:
            run(kernels.came_second_moment, tiles, rows, *given, sums)
        run(kernels.came_codes, len(self.packs), rows, self.grads, self.packs, hyper, scale, commit, self.roots, sums)
        if self.factored:
            run(kernels.came_average, tiles, rows, *given, self.roots, sums, self.partials)
            run(kernels.came_lines, len(self.pieces), *averaged, RESIDUAL=True)
            run(kernels.came_apply, tiles, rows, self.tiles, hyper, commit, self.line_sums, sums)
        else:
            run(kernels.came_move, tiles, rows, *given, sums)
        run(kernels.came_figures, len(self.places), rows, hyper, commit, sums)


class Came(Stepper[CameOptions]):
    """CAME for some buckets on one device."""

    PART = CamePart

    @staticmethod
    def numbers(options: CameOptions) -> list[float]:
        """As `Stepper.numbers`: `came_kernels.py` numbers the columns."""
        o, (beta1, beta2, beta3) = options, options.betas
        return [
            beta1,
            1 - beta1,
            1 - beta2,
            beta3,
            1 - beta3,
            *o.eps,
            -1.0 if o.decay_rate is None else o.decay_rate,
            o.clip_threshold,
            o.scale_eps if o.scale_parameter else -1.0,
            o.bias_correction,
        ]
