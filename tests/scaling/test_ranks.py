"""All ranks skip the same steps: real processes, with overflows in one rank's gradient and in the reduction."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_process_group import run_ranks

pytestmark = pytest.mark.process

START = """
    import sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import Parameter
    from bighorn import ExponentialScale, FixedScale, Lamb, LossScaler, WindowScale

    rank, store, modes = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def make(mode, params):
        if mode.startswith("Lamb"):
            return Lamb(params, lr=0.1, weight_decay=0.1)
        return torch.optim.AdamW(params, lr=0.1, fused=mode.startswith("fused"))

    def same_on_all_ranks(value):
        values = [None, None]
        dist.all_gather_object(values, value)
        return values[0] == values[1]
"""

END = """
    for mode in modes:
        check(mode)
"""


def check_on_two_ranks(check: str, tmp_path: Path, *modes: str) -> None:
    """Check all modes in the same pair of processes, since importing torch takes seconds."""
    run_ranks(START + check + END, 2, str(tmp_path / "store"), *modes)


DDP = """
    def check(mode):
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        alone.load_state_dict(net.state_dict())
        ddp = DistributedDataParallel(net)
        bad = False
        # Runs on this rank's own gradient, before the all-reduce.
        net[0].weight.register_hook(lambda grad: grad * torch.inf if bad and rank == 1 else grad)

        optimizer, other = make(mode, net.parameters()), make(mode, alone.parameters())
        scaler = LossScaler(ExponentialScale(1024.0, backoff_factor=0.5, growth_interval=2))
        scales = []
        for step in range(6):
            bad = step in (1, 2)
            data = torch.randn(4, 5)
            optimizer.zero_grad()
            scaler.scale(ddp(data[2 * rank : 2 * rank + 2]).square().mean()).backward()
            if mode.endswith("clip"):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if not bad:
                other.zero_grad()
                alone(data).square().mean().backward()
                if mode.endswith("clip"):
                    nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                other.step()
            for a, b in zip(net.parameters(), alone.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert scales == [1024, 1024, 512, 512, 1024, 1024], scales
        assert same_on_all_ranks([p.tolist() for p in net.parameters()])
"""


def test_an_overflow_on_one_rank_skips_on_all(tmp_path: Path) -> None:
    """DistributedDataParallel equals one process on the joined batch that omits the same steps."""
    check_on_two_ranks(DDP, tmp_path, "Lamb", "Lamb-clip", "AdamW", "AdamW-clip", "fused")


FP16 = """
    def check(mode):
        from torch.nn.parallel import DistributedDataParallel

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = Parameter(torch.ones(3, dtype=torch.float16))

            def forward(self, factor):
                return (self.weight * factor).sum()

        def sum_first(group, bucket):
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
            return work.then(lambda future: future.value()[0].div_(2))

        net = Net()
        ddp = DistributedDataParallel(net)
        if mode == "Lamb-sum-first":
            ddp.register_comm_hook(None, sum_first)
        optimizer = make(mode, net.parameters())
        scaler = LossScaler(WindowScale(8.0))
        scaler.scale(ddp(torch.tensor(5000.0, dtype=torch.float16))).backward()
        scaler.step(optimizer)
        scaler.update()
        if mode == "Lamb":
            assert net.weight.grad.equal(torch.full((3,), 40000.0, dtype=torch.float16)), net.weight.grad
            assert scaler.get_scale() == 8
            assert optimizer.state[net.weight]["exp_avg"].allclose(torch.full((3,), 500.0))
        else:
            assert net.weight.grad.isinf().all()
            assert scaler.get_scale() == 4
            assert net.weight.equal(torch.ones(3))
"""


def test_the_mean_of_40000_and_40000(tmp_path: Path) -> None:
    """float16 ends at 65504. DDP divides before it sums; a hook that sums first overflows, which is detected."""
    check_on_two_ranks(FP16, tmp_path, "Lamb", "Lamb-sum-first")


OWN = """
    def check(mode):
        # Whole tensors of its own on each rank; rank 1 has no gradient in some steps.
        names = [["a", "b"], ["c"]][rank]
        params = [Parameter(torch.ones(3)) for _ in names]
        optimizer = make(mode, zip(names, params))
        group = dist.group.WORLD
        scaler = LossScaler(WindowScale(64.0), process_group=group, max_consecutive_overflows=2)
        scales = []
        for step, bad in enumerate((None, "b", None, "a", "c", "b")):
            optimizer.zero_grad()
            scaler.scale(sum(p.sum() for p in params)).backward()
            if rank == 1 and step in (0, 1, 3):
                optimizer.zero_grad()
            if bad in names:
                params[names.index(bad)].grad[1] = torch.nan
            before = [p.detach().clone() for p in params]
            if step == 5:  # "a" was the first, "c" the second and last that was allowed
                try:
                    scaler.step(optimizer)
                except FloatingPointError as error:
                    assert "2 steps in a row" in str(error) and "gradients of c on rank 1. " in str(error), error
                else:
                    raise AssertionError("no error")
                break
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            stepped = [not p.equal(q) for p, q in zip(params, before)]
            assert stepped == [bad is None and p.grad is not None for p in params], (step, stepped)
        assert scales == [64, 32, 32, 16, 8]
        assert same_on_all_ranks(scaler.state_dict())
        try:
            import pickle
            pickle.dumps(scaler)
        except TypeError as error:
            assert "state_dict" in str(error)
        else:
            raise AssertionError("pickled")
"""


def test_a_group_whose_ranks_have_tensors_of_their_own(tmp_path: Path) -> None:
    check_on_two_ranks(OWN, tmp_path, "Lamb", "AdamW", "fused")


MESHES = """
    def check(mode):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

        def parameter(mesh, *placements):
            return Parameter(distribute_tensor(torch.ones(5, 3), mesh, placements))

        # The first gradient's mesh has one rank, the second's both, and the third is a plain tensor.
        params = [parameter(mesh["tp"], Replicate()), parameter(mesh["dp"], Shard(0)), Parameter(torch.ones(3))]
        names = ["alone", "sharded", "plain"]
        optimizer = torch.optim.SGD(zip(names, params), lr=1.0, foreach=False)
        scaler = LossScaler(WindowScale(64.0), max_consecutive_overflows=3)
        scaler.scale(torch.ones(()))
        for place, on in ((0, 0), (None, 0), (1, 1), (2, 1), (0, 1)):
            for p in params:
                p.grad = torch.ones_like(p)
            if mode == "idle" and rank == 0:
                optimizer.zero_grad()
            elif place is not None and rank == on:
                grad = params[place].grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.inf
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
            before = [f.detach().clone() for f in full]
            scaler.step(optimizer)
            scaler.update()
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
            overflowed = place is not None and not (mode == "idle" and on == 0)
            stepped = any(not a.equal(b) for a, b in zip(before, full))
            if mode == "all":
                assert stepped != overflowed, (place, on)
            assert same_on_all_ranks(scaler.state_dict())
        assert scaler.get_scale() == (8 if mode == "idle" else 4), scaler.get_scale()
        try:
            scaler.step(optimizer)
        except FloatingPointError as error:
            assert "gradients of alone on rank 1. " in str(error), error
        else:
            raise AssertionError("no error")
"""


def test_mixed_meshes(tmp_path: Path) -> None:
    """Torch 2.13's GradScaler uses only the first gradient's mesh, and raises if plain tensors follow it."""
    check_on_two_ranks(MESHES, tmp_path, "all", "idle")


FSDP = """
    def check(mode):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        net, alone = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
        alone.load_state_dict(net.state_dict())
        for layer in (net[0], net[2], net):
            fully_shard(layer)
        optimizer, other = make(mode, net.parameters()), make(mode, alone.parameters())
        scaler = LossScaler(WindowScale(64.0))
        scales = []
        for step in range(4):
            data = torch.randn(4, 5)
            optimizer.zero_grad()
            scaler.scale(net(data[2 * rank : 2 * rank + 2]).square().mean()).backward()
            if step == 1 and rank == 1:
                net[2].bias.grad.to_local().fill_(torch.nan)  # a shard of this rank alone
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if step != 1:
                other.zero_grad()
                alone(data).square().mean().backward()
                other.step()
            for a, b in zip(net.parameters(), alone.parameters()):
                torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-6)
        assert scales == [64, 32, 32, 32], scales
"""


def test_fsdp2(tmp_path: Path) -> None:
    """With FSDP2, an overflow in the shard of one rank skips the step on all ranks."""
    check_on_two_ranks(FSDP, tmp_path, "AdamW", "fused", "Lamb")


ZERO = """
    def check(mode):
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        before = [p.detach().clone() for p in net.parameters()]
        ddp = DistributedDataParallel(net)
        zero = ZeroRedundancyOptimizer(net.parameters(), Lamb if mode == "Lamb" else torch.optim.AdamW, lr=0.1)
        bad = True
        net[0].bias.register_hook(lambda grad: grad * torch.nan if bad and rank == 0 else grad)
        scaler = LossScaler(WindowScale(64.0))
        for bad in (True, False):
            zero.zero_grad()
            scaler.scale(ddp(torch.ones(2, 5) * (rank + 1)).square().mean()).backward()
            scaler.step(zero)
            scaler.update()
            assert all(a.equal(b) == bad for a, b in zip(before, net.parameters()))
            assert all(p.isfinite().all() for p in net.parameters())
        assert scaler.get_scale() == 32
        assert same_on_all_ranks([p.tolist() for p in net.parameters()])
"""


def test_a_zero_redundancy_optimizer(tmp_path: Path) -> None:
    check_on_two_ranks(ZERO, tmp_path, "Lamb", "AdamW")
