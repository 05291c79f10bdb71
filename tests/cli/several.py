"""For torchrun: commands of ``bighorn`` one after the other, without dropout, so that processes and one agree.

Its argument is a JSON list of jobs: ``command``, in whose words ``{rank}`` stands for the process's number; and, to
happen before that step, ``interrupt``, a step at which a Ctrl-C comes, or ``fail``, one at which process 1 raises. What
a command says instead of ending well goes to ``error-JOB-RANK``.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import click
import torch
import torch.distributed as dist

from bighorn.cli.commands import bighorn
from bighorn.cli.ranks import KEPT
from bighorn.cli.training import Run
from cli.helpers import without_dropout

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
train_step = Run.train_step
join = dist.init_process_group


def run(number: int, command: list[str], interrupt: int = 0, fail: int = 0) -> None:
    def step(self: Run) -> None:
        if self.step + 1 == interrupt:
            signal.raise_signal(signal.SIGINT)
        if self.step + 1 == fail and RANK == 1:
            raise ZeroDivisionError("the reason of it all")
        train_step(self)

    def meet(backend: str) -> None:
        # torchrun's own store has one meeting's addresses for good.
        join(backend, init_method=f"file://{Path.cwd()}/store-{number}", rank=RANK, world_size=WORLD)

    Run.train_step = step  # type: ignore[method-assign]
    dist.init_process_group = meet  # type: ignore[assignment]
    try:
        bighorn([word.format(rank=RANK) for word in command], prog_name="bighorn", standalone_mode=False)
    except (click.ClickException, SystemExit) as error:
        Path(f"error-{number}-{RANK}").write_text(str(error))
    gc.collect()
    KEPT.clear()  # closes the connections, as the end of a process does


if __name__ == "__main__":
    torch.nn.functional.dropout = without_dropout
    for number, job in enumerate(json.loads(sys.argv[1])):
        run(number, **job)
