"""Device time of a step with other sizes of chunks, blocks and tiles.

    python workbench/benchmarks/gpu_tuning.py [SHAPES]

The first line of each optimizer and dtype has the sizes of the library. The sweep shows whether a new device needs
other sizes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, Lamb
from bighorn._kernels.triton import came_launches, lamb, launch_group
from bighorn._kernels.triton.common_kernels import LANES
from bighorn_workbench import cuda
from bighorn_workbench.shapes import SHAPES

SIZES = [None, *itertools.product((8192, 16384, 32768, 65536), (4, 8))]
"""Of Lamb: elements of a chunk, and elements of a block for each thread; None: as they are."""

AREAS = (None, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17)
"""Elements of a tile of Came; None: as they are."""


def main() -> None:
    """Print the median and the least device time of each variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="?", default="bert_large", choices=SHAPES)
    arguments = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in SIZES:
            with pytest.MonkeyPatch.context() as patch:
                if sizes is not None:
                    resize(*sizes, patch)
                words = "as it is" if sizes is None else "chunk {}, {} a thread".format(*sizes)
                print(f"Lamb {dtype} {words}: {measured(Lamb, arguments.shapes, dtype)}", flush=True)
        for area in AREAS:
            with pytest.MonkeyPatch.context() as patch:
                if area is not None:
                    patch.setattr(came_launches, "area_of", lambda _, area=area: area)
                words = "as it is" if area is None else f"area {area}"
                print(f"Came {dtype} {words}: {measured(Came, arguments.shapes, dtype)}", flush=True)


def resize(chunk: int, each: int, patch: pytest.MonkeyPatch) -> None:
    """Let kernels of Lamb that are made from now on have these sizes."""
    original = lamb.LambLaunchGroup.compiled_for
    block = LANES.value * each
    for module in (launch_group, lamb):
        patch.setattr(module, "CHUNK", chunk)
    patch.setattr(
        lamb.LambLaunchGroup, "compiled_for", staticmethod(lambda *types: {**original(*types), "BLOCK": block})
    )


def measured(kind: type[Lamb | Came], name: str, dtype: torch.dtype) -> str:
    """Milliseconds, or why these sizes do not compile or run."""
    state: dict[str, Any] = {} if dtype == torch.float32 else {"state_dtype": dtype}
    try:
        params = list(parameters(name, dtype))
        optimizer = kind(params, lr=1e-4, weight_decay=0.01, backend="triton", **state)
        for _ in range(3):
            optimizer.step()
        timer = cuda.DeviceTimer(optimizer.step, cuda.host_seconds(optimizer.step), cuda.scratch())
        times = sorted(timer() for _ in range(15))
    except cuda.HostBehindError:
        return "the host is too slow"
    except Exception as error:  # the sweep goes on
        return f"{type(error).__name__}: {str(error).strip()[-150:]}"
    return f"{1e3 * times[len(times) // 2]:.3f} ms, least {1e3 * times[0]:.3f}"


def parameters(name: str, dtype: torch.dtype) -> Iterator[Parameter]:
    """A model's parameters, with gradients."""
    torch.manual_seed(0)
    for shape in SHAPES[name]():
        param = Parameter(0.02 * torch.randn(shape, device="cuda", dtype=dtype))
        param.grad = 1e-3 * torch.randn(shape, device="cuda", dtype=dtype)
        yield param


if __name__ == "__main__":
    main()
