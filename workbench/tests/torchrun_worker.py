"""A program for torchrun that runs commands of ``bighorn`` without dropout: results do not depend on processes.

Its argument is a JSON list of jobs. A job has a ``command``, in which ``{rank}`` is replaced by the rank, and may have:
``interrupt``, the step before which a Ctrl-C arrives; ``fail``, the step before which process 1 raises; ``kill``, the
step in which process 1 is killed between backward and update; ``kill_saving``, the step in whose checkpoint process 0,
which writes it, is killed; ``late``, the seconds by which process 1 begins training later. The error of a command is in
``error-JOB-RANK``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from bighorn_workbench.commands import bighorn
from bighorn_workbench.ranks import Interrupt
from bighorn_workbench.run import Run
from bighorn_workbench.train_step import TrainStep
from workbench.tests.command_line import without_dropout

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
train_step, update_step, torch_save = Run.train_step, TrainStep.update, torch.save
join, enter_interrupt = dist.init_process_group, Interrupt.__enter__


def run(
    number: int,
    command: list[str],
    interrupt: int = 0,
    fail: int = 0,
    kill: int = 0,
    kill_saving: int = 0,
    late: int = 0,
) -> None:
    present = 0

    def enter(self: Interrupt) -> Interrupt:
        if RANK == 1:
            time.sleep(late)
        return enter_interrupt(self)

    def step(self: Run) -> None:
        nonlocal present
        present = self.step + 1
        if self.step + 1 == interrupt:
            signal.raise_signal(signal.SIGINT)
        if self.step + 1 == fail and RANK == 1:
            raise ZeroDivisionError("the reason of it all")
        train_step(self)

    def update(self: TrainStep) -> bool:
        if RANK == 1 and present == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return update_step(self)

    def save(checkpoint: Any, file: Any, **options: Any) -> None:
        # torch's object collectives call torch.save, too, and a Ctrl-C may come before step 1
        if kill_saving and present == kill_saving and RANK == 0 and "format" in checkpoint:
            file.write(b"the beginning")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        torch_save(checkpoint, file, **options)

    def meet(backend: str) -> None:
        # torchrun's own store keeps the addresses of one process group forever.
        join(backend, init_method=f"file://{Path.cwd()}/store-{number}", rank=RANK, world_size=WORLD)

    Interrupt.__enter__ = enter  # type: ignore[method-assign]
    Run.train_step = step  # type: ignore[method-assign]
    TrainStep.update = update  # type: ignore[method-assign]
    torch.save = save  # type: ignore[assignment]
    dist.init_process_group = meet  # type: ignore[assignment]
    try:
        bighorn([word.format(rank=RANK) for word in command], prog_name="bighorn", standalone_mode=False)
    except (click.ClickException, SystemExit) as error:
        Path(f"error-{number}-{RANK}").write_text(str(error))


if __name__ == "__main__":
    torch.nn.functional.dropout = without_dropout
    for number, job in enumerate(json.loads(sys.argv[1])):
        run(number, **job)
