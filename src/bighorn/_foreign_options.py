"""Options of other packages' optimizers, each with its package and the remedy here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Foreign(NamedTuple):
    """An option of another package's optimizer.

    Attributes:
        package: The package, or what else has the option.
        remedy: What to use here.
        needs: Our options in the remedy; an optimizer without them has nothing for this option.
        off_is_default: Whether False, 0 and None ask for what is the default here.
    """

    package: str
    remedy: str = "leave it out"
    needs: tuple[str, ...] = ()
    off_is_default: bool = True

    def remedy_with(self, options: Collection[str]) -> str:
        """Return the remedy for an optimizer that has these options."""
        return self.remedy if set(self.needs) <= set(options) else "leave it out"


SYNONYMS = {
    "learning_rate": "lr",
    "learnrate": "lr",
    "lrate": "lr",
    "epsilon": "eps",
    "weight_decay_rate": "weight_decay",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "beta_1": "betas",
    "beta_2": "betas",
    "b1": "betas",
    "b2": "betas",
    "process_group": "grad_norm_group",
}
"""Names of arguments in other packages that are too different from ours for `difflib`."""

OF_TORCH: Mapping[str, Foreign] = {
    "foreach": Foreign("torch.optim", 'use backend="foreach"'),
    "fused": Foreign(
        "torch.optim", 'every backend is fused; choose one with backend="auto", "cpu", "triton" or "foreach"'
    ),
    "capturable": Foreign("torch.optim", "no option is needed; backend=... chooses the kernels"),
    "differentiable": Foreign(
        "torch.optim", "steps are not differentiable on any backend=...; use torch.optim for that"
    ),
    "amsgrad": Foreign("torch.optim", 'use second_moment="amsgrad"', ("second_moment",)),
    "momentum": Foreign("torch.optim.SGD", "use betas, whose first is the decay of the first moment", ("betas",)),
    "dampening": Foreign("torch.optim.SGD"),
    "nesterov": Foreign("torch.optim.SGD"),
    "relative_step": Foreign("Adafactor", "use lr=bighorn.schedules.RelativeStep()"),
    "warmup_init": Foreign("Adafactor", "use lr=bighorn.schedules.RelativeStep(warmup_init=True)"),
}
"""Options of torch's optimizers."""

OF_SGD = frozenset(name for name, option in OF_TORCH.items() if option.package == "torch.optim.SGD")
"""The options of torch.optim.SGD that are not ours. Momentum schedulers write them into the groups of any optimizer."""

_BOUNDS = "use trust_ratio_bounds=(min_coeff, max_coeff)", ("trust_ratio_bounds",), False
_TWO_EPS = "use eps=(eps1, eps2)", ("clip_threshold",), False  # only CAME takes a pair of eps, and clip_threshold
_STOCHASTIC = 'use weight_rounding="stochastic"'
_CAUTIOUS = "use cautious", ("cautious",)

FOREIGN: Mapping[str, Foreign] = {
    **OF_TORCH,
    "caution": Foreign("timm", *_CAUTIOUS),
    "trust_coeff": Foreign("timm", "use trust_coefficient of Lars", off_is_default=False),
    "adam_w_mode": Foreign(
        "apex", 'leave it out, or use decay_mode="l2" for adam_w_mode=False', ("decay_mode",), False
    ),
    "set_grad_none": Foreign("apex", "use zero_grad(set_to_none=...)"),
    "reduced_precision_dtype": Foreign(
        "apex", 'use weight_rounding="master", for float32 weights of 16-bit parameters'
    ),
    "min_coeff": Foreign("DeepSpeed", *_BOUNDS),
    "max_coeff": Foreign("DeepSpeed", *_BOUNDS),
    "clamp_value": Foreign(
        "torch_optimizer", "use weight_norm_bounds=(0, clamp_value)", ("weight_norm_bounds",), False
    ),
    "debias": Foreign("torch_optimizer", "use bias_correction", ("bias_correction",), False),
    "weight_decouple": Foreign("pytorch_optimizer", 'use decay_mode="decoupled"', ("decay_mode",), False),
    "fixed_decay": Foreign("pytorch_optimizer", "leave it out: decay is multiplied by lr"),
    "pre_norm": Foreign("pytorch_optimizer", "use max_grad_norm"),
    "ams_bound": Foreign("pytorch_optimizer", "leave it out: Came has no AMSGrad"),
    "eps1": Foreign("pytorch_optimizer", *_TWO_EPS),
    "eps2": Foreign("pytorch_optimizer", *_TWO_EPS),
    "eta": Foreign("Barlow Twins", "use trust_coefficient of Lars", off_is_default=False),
    "lars_adaptation_filter": Foreign("Barlow Twins", "use exclude_from_layer_adaptation of the constructor"),
    "weight_decay_filter": Foreign("Barlow Twins", "use exclude_from_weight_decay of the constructor"),
    "trust_ratio": Foreign("other packages", "use adapt=False in the groups that have none", ("always_adapt",), False),
    "stochastic_rounding": Foreign("OneTrainer", _STOCHASTIC),
    "use_cautious": Foreign("OneTrainer and sdnq", *_CAUTIOUS),
    "use_stochastic_rounding": Foreign("sdnq", _STOCHASTIC),
    "use_quantized_buffers": Foreign("sdnq", 'use state_dtype="int8"'),
    "enable_stochastic_rounding": Foreign("axolotl", _STOCHASTIC),
    "enable_cautious": Foreign("axolotl", *_CAUTIOUS),
    "enable_8bit": Foreign("axolotl", 'use state_dtype="int8"'),
    "block_size": Foreign("SANA", "leave it out: blocks have 256 elements", off_is_default=False),
    "quant_block_size": Foreign("OneTrainer", "leave it out: blocks have 256 elements", off_is_default=False),
    "cautious_weight_decay": Foreign("LoRA_Easy", "leave it out: decay is of all elements"),
    "non_factored_confidence": Foreign("LoRA_Easy", "leave it out: vectors have no confidence"),
    "update_strategy": Foreign(
        "LoRA_Easy", 'use cautious=True for "cautious" and "both", and nothing for "unmodified"', ("cautious",), False
    ),
}
"""Options of other packages' optimizers. Arguments that select a preset are in `presets.ELSEWHERE` as well."""

NOT_ADAPTED = {"lars_exclude": True, "layer_adaptation": False}
"""Keys of other LARS that switch the trust ratio of a group off, with the value that does; I-JEPA has LARS_exclude."""
