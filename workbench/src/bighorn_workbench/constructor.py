"""The lines that construct the optimizer of a trial, with its schedule, in a program of the user."""

from typing import Any

from bighorn import Came
from bighorn_workbench.config import RunConfig
from bighorn_workbench.hidden_matrices import MuonWithAdamW
from bighorn_workbench.optimizers import OF_BIGHORN, OPTIMIZERS, STATE_DTYPES
from bighorn_workbench.values import read_options, warmup_steps


def constructor(config: RunConfig, steps: int, excluded: bool = False) -> str:
    """Return the lines for a model of the name ``model``.

    Args:
        config: The resolved options of a run, with a schedule that is linear after its warm-up.
        steps: The steps of the run.
        excluded: Whether the user's ``task.excluded`` names the parameters without weight decay. Default: False,
            parameters of fewer than two dims

    Example:
        >>> print(constructor(RunConfig(batch_size=32, lr=0.01, weight_decay=0.1), steps=100))
        import bighorn
        from bighorn.schedules import Polynomial
        <BLANKLINE>
        optimizer = bighorn.Lamb(
            model.parameters(),
            lr=Polynomial(lr=0.01, decay_steps=90).after_warmup(10),
            weight_decay=0.1,
            exclude_from_weight_decay="ndim<2",
            exclude_from_layer_adaptation="ndim<2",
        )
    """
    recipe = OPTIMIZERS[config.optimizer]
    kind, options = recipe.kind, {**recipe.fixed, **read_options(config.optimizer_option)}
    warmup = warmup_steps(config.warmup, steps)
    schedule = f"decay_steps={max(steps - warmup, 1)})" + f".after_warmup({warmup})" * (warmup > 0)
    if config.optimizer in OF_BIGHORN:
        if config.state_dtype is not None:
            options["state_dtype"] = STATE_DTYPES[config.state_dtype]
        if config.max_grad_norm is not None:
            options["max_grad_norm"] = config.max_grad_norm
        lr = f"Polynomial(lr={config.peak_lr():g}, {schedule}"
        lines = _of_bighorn(kind, lr, config.weight_decay, options, excluded)
    else:
        factor = f"Polynomial(lr=1.0, {schedule}"
        lines = _of_torch(kind, config.peak_lr(), factor, config.weight_decay, options, excluded)
        if config.max_grad_norm is not None:
            lines.append(
                f"# before each step: torch.nn.utils.clip_grad_norm_(model.parameters(), {config.max_grad_norm:g})"
            )
    if config.precision == "bf16":
        lines.insert(lines.index("") + 1, "model.to(torch.bfloat16)")
        lines = lines if "import torch" in lines else ["import torch", *lines]
    return "\n".join(lines)


def _of_bighorn(kind: Any, lr: str, weight_decay: float | None, options: dict[str, Any], excluded: bool) -> list[str]:
    """Lines for an optimizer of Bighorn, whose rate is a schedule."""
    adapt = [] if kind is Came else ["adapt=False"]
    patterns = [] if excluded else options.pop("exclude_from_layer_adaptation", [])
    made = [f"bighorn.{kind.__name__}(", f"    lr={lr},"]
    made += [f"    {name}={value!r}," for name, value in options.items()]
    made.append(f"    weight_decay={weight_decay:g},")
    imports = ["import bighorn"]
    if excluded:
        imports.append("from bighorn.groups import Rule, by_rules")
        rule = ", ".join(["task.excluded", "weight_decay=0.0", *adapt])
        made.insert(1, f"    by_rules(model.named_parameters(), [Rule({rule})]),")
    else:
        made.insert(1, f"    model.{'named_' * bool(patterns)}parameters(),")
        made.append('    exclude_from_weight_decay="ndim<2",')
        without = [*patterns, "ndim<2"] if patterns else '"ndim<2"'
        made += [f"    exclude_from_layer_adaptation={without},"] * bool(adapt)
    return [*imports, "from bighorn.schedules import Polynomial", "", f"optimizer = {made[0]}", *made[1:], ")"]


def _of_torch(
    kind: Any, lr: float, factor: str, weight_decay: float | None, options: dict[str, Any], excluded: bool
) -> list[str]:
    """Lines for an optimizer of torch or of two rules, and a scheduler that multiplies its rate."""
    ours = kind.__module__ == MuonWithAdamW.__module__
    made = f"{'' if ours else 'torch.optim.'}{kind.__name__}"
    of = "(name, p)" if ours else "p"
    without = "task.excluded(name, p)" if excluded else "p.ndim < 2"
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return [
        "import torch",
        "from bighorn.schedules import Polynomial",
        *[f"from {kind.__module__} import {made}"] * ours,
        "",
        f"excluded = {{name for name, p in model.named_parameters() if {without}}}",
        "groups = [",
        f'    {{"params": [{of} for name, p in model.named_parameters() if name not in excluded], '
        f'"weight_decay": {weight_decay:g}}},',
        f'    {{"params": [{of} for name, p in model.named_parameters() if name in excluded], "weight_decay": 0.0}},',
        "]",
        f"optimizer = {made}(groups, lr={lr:g}{more})",
        "# after each step: scheduler.step()",
        f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, {factor})",
    ]
