"""Distributed training: steps that overlap communication, weight-update sharding, and gradient release.

DistributedDataParallel sends gradients in buckets, but its `backward()` returns only when the last one has arrived, and
then the optimizer starts. With TailOverlap, `backward()` returns at once, and the step processes the buckets as they
arrive. The idea is the tailing optimisation of Ascend's NPUOptimizer.
"""

from bighorn._distributed.flat import FlatLayout, Fragment
from bighorn._distributed.gradient_release import Release, release_gradients
from bighorn._distributed.megatron_map import megatron_groups
from bighorn._distributed.overlap import TailOverlap
from bighorn._distributed.shard_update import shard_update

__all__ = [
    "FlatLayout",
    "Fragment",
    "Release",
    "TailOverlap",
    "megatron_groups",
    "release_gradients",
    "shard_update",
]
