"""`process_group`: the global gradient norm where each rank holds whole tensors of its own, as under ZeRO."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import sys, torch
    import torch.distributed as dist
    from torch.nn import Parameter
    from bighorn import Lamb

    rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def parameters():
        torch.manual_seed(0)
        return [Parameter(torch.randn(5, 4)), Parameter(torch.randn(70))]

    def gradients(bad):
        torch.manual_seed(1)
        grads = [torch.randn(5, 4), torch.randn(70)]
        if bad:
            grads[0][0, 0] = torch.nan
        if mode == "idle":
            grads[1] = None  # rank 1 has nothing to do in this step
        return grads

    options = dict(lr=0.1, weight_decay=0.1, max_grad_norm=0.5, skip_nonfinite=True)
    whole = parameters()
    alone = Lamb(whole, **options)
    mine = parameters()[rank]
    sharded = Lamb([mine], process_group=dist.group.WORLD, **options)
    for bad in (False, mode == "nonfinite", False):
        grads = gradients(bad)
        for p, g in zip(whole, grads):
            p.grad = None if g is None else g.clone()
        mine.grad = None if grads[rank] is None else grads[rank].clone()
        alone.step()
        sharded.step()
    torch.testing.assert_close(mine, whole[rank], rtol=1e-6, atol=1e-7)
    assert mode == "idle" or not mine.equal(parameters()[rank])
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("mode", ["finite", "nonfinite", "idle"])
def test_the_norm_is_summed_over_the_group(mode: str, tmp_path: Path) -> None:
    """Clipped and skipped as one process would that holds everything; a rank without gradients must not be missed."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), mode], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        pytest.fail("a rank waits for the other's part of the norm")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
