"""DeepSpeed with one of bighorn's optimizers as the client optimizer: docs/with-deepspeed.md."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install deepspeed", allow_module_level=True)

ENGINE = """
import sys, torch, deepspeed
import deepspeed.ops
from bighorn import Lamb
from tests.support.trainer_model import OPTIONS, Net, assert_same, batches, by_hand

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # shared memory between ranks: would be compiled

def lamb(net):
    return Lamb(net.named_parameters(), lr=0.05, **OPTIONS)

def engine(net, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        **more,
    }
    store = f"file://{sys.argv[1]}/store"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=store, rank=0, world_size=1)
    return deepspeed.initialize(model=net, optimizer=lamb(net), config=config)[0]

def go(engine, batches):
    for inputs, labels in batches:
        engine.backward(engine(inputs, labels)["loss"])
        engine.step()

net = Net()
trained = engine(net)
assert type(trained.optimizer) is Lamb, type(trained.optimizer)
go(trained, batches()[:6])
trained.save_checkpoint(sys.argv[1] + "/saved")
go(trained, batches()[6:])
assert_same(net, by_hand(lamb, accumulate=2, clip=0.5))

resumed = Net()
other = engine(resumed)
other.load_checkpoint(sys.argv[1] + "/saved")
go(other, batches()[6:])
for a, b in zip(net.parameters(), resumed.parameters()):
    assert a.equal(b)

zero = engine(Net(), zero_optimization={"stage": 1}, zero_allow_untested_optimizer=True)
go(zero, batches())
assert_same(zero.module, by_hand(lamb, accumulate=2, clip=0.5))
print("trained")
"""


def test_a_client_optimizer_trains_and_resumes(tmp_path: Path) -> None:
    """The process is separate, since DeepSpeed sets up torch.distributed, environment variables and a logger."""
    run = subprocess.run(
        [sys.executable, "-c", ENGINE, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "trained"
