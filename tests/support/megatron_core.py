"""megatron-core's buffers and distributed optimizer on a CPU, in place of CUDA."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine and apex are not installed
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig


class _OnTheCPU(TorchFunctionMode):
    """Maps the device "cuda" to the CPU, and `type()` to CUDA's names, by which Megatron recognises dtypes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(result, str) else result


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let Megatron run without CUDA."""
    with _OnTheCPU(), mock.patch("torch.cuda.current_device", return_value="cpu"):
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        yield


class Megatron:
    """A model in Megatron's DistributedDataParallel, with Megatron's optimizers.

    Attributes:
        model: The model itself.
        optimizer: The optimizer that Megatron's trainer steps and saves.
        distributed: Its DistributedOptimizer.
    """

    def __init__(self, model: nn.Module, bucket_size: int) -> None:
        dtype = next(model.parameters()).dtype
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        buckets = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            bucket_size=bucket_size,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,  # without it there is one bucket
        )
        options = OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            weight_decay=0.1,
            clip_grad=math.inf,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.model = model
        wrapped = DistributedDataParallel(config, buckets, model)
        self.optimizer = get_megatron_optimizer(options, [wrapped])
        [self.distributed] = self.optimizer.chained_optimizers

    def ranges(self) -> dict[nn.Parameter, slice]:
        """Return the range of each parameter whose gradient this rank has after the reduction."""
        return {
            param: slice(held["param"].start, held["param"].end)
            for by_dtype in self.distributed.gbuf_ranges
            for buckets in by_dtype.values()
            for bucket in buckets
            for param, held in bucket["param_map"].items()
        }

    def step(self, grads: dict[str, Tensor]) -> None:
        """Step with gradients, from which this rank takes its own ranges."""
        ranges = self.ranges()
        for buffer in self.distributed.buffers:
            buffer.grad_data.fill_(torch.nan)
        for name, param in self.model.named_parameters():
            if param in ranges:
                param.main_grad.view(-1)[ranges[param]] = grads[name].view(-1)[ranges[param]]  # type: ignore[attr-defined]
        self.optimizer.step()
