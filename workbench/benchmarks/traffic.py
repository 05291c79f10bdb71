"""The bytes of device memory that a step of an optimizer reads and writes, and their rate relative to a copy."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bighorn import Came, Lamb
from bighorn_workbench import cuda
from bighorn_workbench.measure import Change

COPIES = 20


def copy_speed() -> float | None:
    """Bytes per second, read and written, of a copy within the device's memory, timed as steps are; a median.

    None if the host cannot be ahead of the device.
    """
    source, target = cuda.scratch(), cuda.scratch()

    def copy() -> Tensor:
        return target.copy_(source)

    timer = cuda.DeviceTimer(copy, cuda.host_seconds(copy), cuda.scratch())
    try:
        return 2 * cuda.SWEEP_BYTES / statistics.median(timer() for _ in range(COPIES))
    except cuda.HostBehindError:
        return None


def step_times(baseline: Optimizer, optimizer: Optimizer, seconds: float, changes: Sequence[Change]) -> dict[str, Any]:
    """As :func:`bighorn_workbench.cuda.step_times`, with bytes, and the rates of copies before and after the steps."""
    before = copy_speed()
    times = cuda.step_times(baseline, optimizer, seconds, changes)
    clip = isinstance(optimizer, Lamb | Came) and optimizer._settings.max_grad_norm is not None
    return {
        **times,
        "copy_bytes_per_s": [before, copy_speed()],
        "weight_bytes": sum(param.nbytes for group in optimizer.param_groups for param in group["params"]),
        "bytes_moved": bytes_moved(optimizer, clip),
    }


def bytes_once(row: Mapping[str, Any]) -> int:
    """Return the lower bound of a step's bytes: weights and state read and written once, gradients read once."""
    return 3 * int(row["weight_bytes"]) + 2 * int(row["state_bytes"] or 0)


def of_copy(row: Mapping[str, Any], size: int) -> str:
    """Return the rate of a step that moves ``size`` bytes, relative to the mean rate of the copies."""
    speeds = [speed for speed in row.get("copy_bytes_per_s", ()) if speed is not None]
    if not speeds or row["ms"] is None:
        return "-"
    return f"{size / (1e-3 * row['ms']['median']) / statistics.mean(speeds):.0%}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "of copy": lambda row: of_copy(row, row["bytes_moved"] or bytes_once(row)),
    "of copy, once": lambda row: of_copy(row, bytes_once(row)),
}
"""The columns of a GPU's table. The passes of other packages' optimizers are not known, so for them both are alike."""


def bytes_moved(optimizer: Optimizer, clip: bool) -> int | None:
    """Return the bytes that the Triton kernels of this package read and write in all passes, as in results/gpu.md.

    The sums that a pass keeps for the next one, less than 2% of the parameters, are not counted.

    Args:
        optimizer: An optimizer after its first step.
        clip: Whether gradients are clipped, which reads them once more.

    Returns:
        The bytes; None for an optimizer that is not of this package or is served by another backend.
    """
    if not isinstance(optimizer, Lamb | Came):
        return None
    if any(line.split()[2] != "triton" for line in optimizer.explain().splitlines() if line.startswith("group")):
        return None
    moved = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            weight, state = param.nbytes, optimizer.state[param]
            moved += _lamb(group, weight, state) if isinstance(optimizer, Lamb) else _came(weight, state)
            moved += clip * weight
    return moved


def _lamb(group: Mapping[str, Any], weight: int, state: Mapping[str, Tensor]) -> int:
    """Count one pass for moments and norms, and, with a trust ratio, a second one for the weights."""
    kept = sum(value.nbytes for value in state.values())
    one_pass = 3 * weight + 2 * kept
    return one_pass if group["adam"] or not group["adapt"] else one_pass + weight + kept


def _came(weight: int, state: Mapping[str, Tensor]) -> int:
    """Count four passes (g^2, u^2, residuals, weights), or two if unfactored (second moment, weights).

    A master is only in the last pass.
    """
    exp_avg = state["exp_avg"].nbytes
    others = 2 * (sum(value.nbytes for value in state.values()) - exp_avg)
    if "exp_avg_sq" in state:
        return 4 * weight + 2 * exp_avg + state["exp_avg_sq"].nbytes + others
    return 5 * weight + 3 * exp_avg + others
