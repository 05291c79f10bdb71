"""Data-parallel training whose optimizer starts before the last gradients have come over the wire.

DistributedDataParallel sends gradients in buckets, but its `backward()` returns only when the last one has arrived, and
then the optimizer starts. Here `backward()` returns at once, and the step takes the buckets as they arrive. The idea is
the tailing optimisation of Ascend's NPUOptimizer.
"""

from bighorn.parallel.overlap import TailOverlap
from bighorn.parallel.shard_update import shard_update

__all__ = ["TailOverlap", "shard_update"]
