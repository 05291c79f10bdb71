"""A stand-in for Megatron-LM's buffers and its distributed optimizer, on the CPU, with the same ranges and attributes.

It follows NVIDIA/Megatron-LM at commit 001199898c4badd01eaf0785c212d8ed7ce83042:

* megatron/core/distributed/param_and_grad_buffer.py, `_ParamAndGradBuffer.__init__`: parameters in reverse order, which
  start at multiples of 64, buckets that end at a multiple of lcm(ranks, 128), and `param.main_grad` in the buffer.
* megatron/core/optimizer/distrib_optimizer.py, `_build_model_gbuf_range` and `_build_model_gbuf_param_range_map`: each
  rank has an equal part of each bucket, and of a parameter what is in it; `_build_optimizer_group_ranges` and
  `_build_model_and_main_param_groups`: a tensor for each of these ranges, a view of a float32 parameter or a float32
  copy of another one, in place of the groups' parameters; `__init__`, which takes Adam alone.
* `_copy_model_grads_to_main_grads` and `_copy_main_params_to_model_params` around the step of the inner optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Range:
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass
class Bucket:
    offset: int
    numel: int


@dataclass
class Buffer:
    """The parameters and gradients of one dtype, one after another."""

    params: Sequence[nn.Parameter]
    bucket_size: int
    data_parallel_group: Any
    tp_group: Any = None
    index_map: dict[nn.Parameter, tuple[int, int]] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)

    def __post_init__(self) -> None:
        divisor, start, first = math.lcm(self.data_parallel_group.size(), 128), 0, 0
        backwards = list(self.params)[::-1]
        for param in backwards:
            start = -(-start // 64) * 64
            end = start + param.numel()
            self.index_map[param] = (start, end)
            start = end
            if end - first >= self.bucket_size or param is backwards[-1]:
                start = -(-end // divisor) * divisor
                self.buckets.append(Bucket(first, start - first))
                first = start
        self.param_data = torch.zeros(start, dtype=self.params[0].dtype)
        self.grad_data = torch.zeros(start, dtype=torch.float32)
        for param, (begin, end) in self.index_map.items():
            self.param_data[begin:end] = param.detach().flatten()
            param.data = self.param_data[begin:end].view(param.shape)
            param.main_grad = self.grad_data[begin:end].view(param.shape)  # type: ignore[attr-defined]

    def range_map(self) -> list[dict[str, Any]]:
        """Return for each bucket the ranges of the parameters in this rank's part of it."""
        rank, world, found = self.data_parallel_group.rank(), self.data_parallel_group.size(), []
        for bucket in self.buckets:
            each = bucket.numel // world
            mine = Range(bucket.offset + rank * each, bucket.offset + (rank + 1) * each)
            param_map = {}
            for param, (start, end) in self.index_map.items():
                first, last = max(start, mine.start), min(end, mine.end)
                if first < last:
                    param_map[param] = {"gbuf_world": Range(first, last), "param": Range(first - start, last - start)}
            found.append({"param_map": param_map})
        return found


class DistributedOptimizer:
    """Megatron's distributed optimizer, as far as an inner optimizer sees it."""

    def __init__(self, optimizer: torch.optim.AdamW, model: nn.Module, bucket_size: int, tp_group: Any = None) -> None:
        self.model_chunks, self.data_parallel_group, self.optimizer = [model], dist.group.WORLD, optimizer
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in model.parameters():
            by_dtype.setdefault(param.dtype, []).append(param)
        self.buffers = [Buffer(params, bucket_size, dist.group.WORLD, tp_group) for params in by_dtype.values()]
        self.gbuf_ranges = [{(b.param_data.dtype, torch.float32): b.range_map()} for b in self.buffers]
        ranges = {
            p: r for maps in self.gbuf_ranges for m in maps.values() for b in m for p, r in b["param_map"].items()
        }
        self.ranges = ranges
        self.model_fp32_groups: list[list[nn.Parameter]] = []
        self.model_float16_groups: list[list[nn.Parameter]] = []
        for group in optimizer.param_groups:
            mine = [p for p in ranges if any(p is q for q in group["params"])]
            wide = [p for p in mine if p.dtype == torch.float32]
            half = [p for p in mine if p.dtype != torch.float32]
            self.model_fp32_groups.append(wide)
            self.model_float16_groups.append(half)
            group["params"] = [
                *(p.view(-1)[self._of(p)] for p in wide),  # not leaves, as there
                *(p.detach().view(-1)[self._of(p)].clone().float() for p in half),
            ]

    def _of(self, param: nn.Parameter) -> slice:
        return slice(self.ranges[param]["param"].start, self.ranges[param]["param"].end)

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = []
        for i, group in enumerate(self.optimizer.param_groups):
            mine = [*self.model_fp32_groups[i], *self.model_float16_groups[i]]
            pairs += list(zip(mine, group["params"], strict=False))  # not with an empty flat tensor of ours
        return pairs

    def step(self) -> None:
        """Step the inner optimizer with the gradients of this rank's ranges, and give all ranks the new parameters."""
        for param, shard in self._pairs():
            shard.grad = param.main_grad.view(-1)[self._of(param)].float()  # type: ignore[attr-defined]
        self.optimizer.step()
        for param, shard in self._pairs():
            param.detach().view(-1)[self._of(param)].copy_(shard)
        world, rank = dist.get_world_size(), dist.get_rank()
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                whole = buffer.param_data[bucket.offset : bucket.offset + bucket.numel]
                parts = [torch.empty_like(part) for part in whole.chunk(world)]
                dist.all_gather(parts, whole.chunk(world)[rank].clone())
                whole.copy_(torch.cat(parts))
