"""DeepSpeed with one of bighorn's optimizers as the client optimizer: docs/with-deepspeed.md."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.trainer_model import INSTALL

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


LISTS = """
from bighorn import Came

for kind in (Lamb, Came):
    lamb = lambda net: kind(net.named_parameters(), lr=0.05, weight_decay=0.1, backend="foreach")
    for stage in (0, 1, 2):
        trained = engine(Net(), zero_optimization={"stage": stage}, zero_allow_untested_optimizer=True)
        go(trained, batches())
        assert_same(trained.module, by_hand(lamb, accumulate=2, clip=0.5))
print("trained")
"""

TRAINER = """
import sys, torch, deepspeed, transformers
import deepspeed.ops
from bighorn import Came, Lamb
from tests.support.trainer_model import EXCLUDED, INPUTS, LABELS, Net, assert_same, by_hand

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as above
store = f"file://{sys.argv[1]}/store"
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=store, rank=0, world_size=1)
DATA = [{"inputs": inputs, "labels": label} for inputs, label in zip(INPUTS, LABELS, strict=True)]

class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(DATA)

def trained(net, **optimizer):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    arguments = transformers.TrainingArguments(
        sys.argv[1], use_cpu=True, deepspeed=config, per_device_train_batch_size=2, num_train_epochs=1,
        lr_scheduler_type="constant", max_grad_norm=0.5, weight_decay=0.1, save_strategy="no", report_to=[],
    )
    trainer = InOrder(model=net, args=arguments, train_dataset=DATA, **optimizer)
    trainer.train()
    return trainer

for kind, own in ((Lamb, {"exclude_from_layer_adaptation": EXCLUDED}), (Came, {})):
    net = Net()
    made = trained(net, optimizer_cls_and_kwargs=(kind, {"lr": 0.05, "names": net, **own}))
    assert type(made.optimizer.optimizer.optimizer) is kind
    options = {"lr": 0.05, "weight_decay": 0.1, "exclude_from_weight_decay": EXCLUDED, **own}
    assert_same(made.model, by_hand(lambda net: kind(net.named_parameters(), **options), clip=0.5))
net = Net()
dropped = trained(net, optimizers=(Lamb(net.named_parameters(), lr=0.05), None))
assert type(dropped.optimizer.optimizer.optimizer) is torch.optim.AdamW  # docs/with-transformers.md says so
print("trained")
"""


PROGRAMS = {
    "engine": ENGINE,
    "lists": ENGINE.partition("\nnet = Net()")[0] + LISTS,
    "transformers": TRAINER,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_optimizer_trains_and_resumes(program: str, tmp_path: Path) -> None:
    """The process is separate, since DeepSpeed changes torch.distributed, environment variables and a logger."""
    if program == "transformers":
        pytest.importorskip("transformers", reason=INSTALL)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAMS[program], str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "trained"
