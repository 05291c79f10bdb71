"""The comparisons that have a name, as ``bighorn compare --study`` runs them: adding one is one entry."""

from collections.abc import Mapping
from dataclasses import dataclass

from bighorn.cli.tasks import Task


@dataclass(frozen=True)
class Study:
    """A question, and the cells that answer it.

    Attributes:
        asks: The question.
        batches: By optimizer, its batch sizes as multiples of the task's.
    """

    asks: str
    batches: Mapping[str, tuple[float, ...]]

    def batch_sizes(self, task: Task) -> dict[str, tuple[int, ...]]:
        """The batch sizes of each optimizer on a task."""
        return {
            name: tuple(round(factor * task.batch_size) for factor in factors) for name, factors in self.batches.items()
        }


STUDIES = {
    # The line of LAMBrrr's TODO, and Adam at 4 times the batch: without it nobody sees whether that takes LAMB.
    "lambrrr": Study(
        "Adam, LAMB, and both at 4 times the batch: do they converge alike?", {"adam": (1, 4), "lamb": (1, 4)}
    ),
    # What a step of CAME saves in memory, and what of its published start is worth keeping.
    "came": Study(
        "CAME, its momentum in fewer bits, its start corrected, and the usual: which learns best?",
        dict.fromkeys(("came", "came-bf16", "came-int8", "came-corrected", "adamw", "adafactor"), (1,)),
    ),
    # 64 to 16384 on mnist.
    "large-batch": Study(
        "Batches of 64 times the size after as many epochs: who keeps its accuracy?",
        dict.fromkeys(("sgd", "adam", "adamw", "lamb", "lambc"), (0.25, 1, 4, 16, 64)),
    ),
    # 16 to 256 on text, with what keeps less state than Adam does.
    "batch-and-state": Study(
        "Larger batches and less state: who still learns?",
        dict.fromkeys(("sgd", "adam", "adamw", "lamb", "lambc", "came", "adafactor"), (0.25, 1, 4)),
    ),
    # 16384 on mnist-rows.
    "recurrent": Study(
        "LAMB is said to fail on recurrent networks at a batch of 16384: does it, and what helps?",
        dict.fromkeys(("adam", "lamb", "lambc", "lamb-clipped", "lamb-warm", "lamb-free"), (64,)),
    ),
    # What few bits cost: weights in bf16, stored in each way, and moments in each form, beside fp32.
    "precision": Study(
        "LAMB with weights and moments in fewer bits: what is lost?",
        dict.fromkeys(
            (
                *("lamb", "lamb-bf16", "lamb-fp16", "lamb-int8"),
                *("lamb-nearest", "lamb-stochastic", "lamb-kahan", "lamb-master"),
            ),
            (1,),
        ),
    ),
}
