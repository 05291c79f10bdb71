"""npu_bridge's NPUDistributedOptimizer and NPULossScaleOptimizer, which are NPUOptimizers with fewer arguments."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bighorn import shard_update
from bighorn.arguments import knows_its_keywords
from bighorn.compat import _checks
from bighorn.compat._loss_scale import LossScaleManager
from bighorn.compat._npu_optimizer import NPUOptimizer


@knows_its_keywords
class NPUDistributedOptimizer(NPUOptimizer):
    """npu_bridge's NPUDistributedOptimizer: an NPUOptimizer that is always distributed, and may shard the update.

    Args:
        optimizer: Any torch optimizer; for weight-update sharding, one that has not stepped yet.
        is_weight_update_sharding: Each rank keeps the state of some of the tensors, steps these and sends them to the
            others, by `bighorn.shard_update`. Default: False.
        name: The name, which is kept as an attribute. Default: None.
        model: As for NPUOptimizer; it is required. Default: None.

    Raises:
        TypeError: `is_weight_update_sharding` is neither True nor False.
        ValueError: As for NPUOptimizer, or as for `bighorn.shard_update`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        is_weight_update_sharding: bool = False,
        name: str | None = None,
        *,
        model: DistributedDataParallel | None = None,
    ) -> None:
        sharding = _checks.flag("is_weight_update_sharding", is_weight_update_sharding)
        super().__init__(optimizer, is_distributed=True, name=name, model=model)
        if sharding:
            self.opt = shard_update(optimizer, model.process_group if model is not None else None)


@knows_its_keywords
class NPULossScaleOptimizer(NPUOptimizer):
    """npu_bridge's NPULossScaleOptimizer: an NPUOptimizer that scales the loss, and overlaps nothing.

    Args:
        opt: As for NPUOptimizer.
        loss_scale_manager: As for NPUOptimizer.
        is_distributed: As for NPUOptimizer. Default: False.
        model: As for NPUOptimizer. Default: None.
    """

    def __init__(
        self,
        opt: Optimizer,
        loss_scale_manager: LossScaleManager,
        is_distributed: bool = False,
        *,
        model: DistributedDataParallel | None = None,
    ) -> None:
        super().__init__(opt, loss_scale_manager, is_distributed, is_loss_scale=True, model=model)
