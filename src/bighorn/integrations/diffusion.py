"""A command that runs the scripts of six diffusion trainers with Came, Lamb and Lars, without an edited file.

The command is `python -m bighorn.integrations.diffusion sdxl_train.py --optimizer_type bighorn.Came ...`. It changes
modules of sd-scripts, musubi-tuner, OneTrainer, SimpleTuner, ai-toolkit and diffusion-pipe when the script imports
them. docs/with-diffusion.md has the line for each trainer.
"""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from bighorn import Came, Lamb, Lars
from bighorn.integrations._launchers import came, has_script

__all__ = ["main"]

_OPTIMIZERS: dict[str, Callable[..., Any]] = {"came": came, "lamb": Lamb, "lars": Lars}


def _read(module: ModuleType, name: str, *expected: str) -> Callable[..., Any]:
    """Return a function of a trainer, or raise if it is not as in the version that was read."""
    found = getattr(module, name, None)
    parameters = inspect.signature(found).parameters if callable(found) else {}
    missing = [each for each in expected if each not in parameters]
    if found is None or missing:
        what = f"argument {missing[0]!r} of {name}" if found is not None else f"function {name}"
        raise RuntimeError(
            f"{module.__name__} has no {what}, which bighorn.integrations.diffusion needs: this version of the trainer "
            "is not known. For other optimizers start the script without bighorn"
        )
    return found  # type: ignore[no-any-return]


def _one_micro_batch(steps: int) -> None:
    if steps > 1:
        raise ValueError(
            f"fused_backward_pass steps after each backward, but gradient_accumulation_steps is {steps}: set it to 1, "
            "or leave --fused_backward_pass out"
        )


def _sd_scripts(module: ModuleType) -> None:
    """Let `get_optimizer` accept `--fused_backward_pass` with our optimizers; it asserts Adafactor."""
    theirs = _read(module, "get_optimizer", "args", "trainable_params")

    def get_optimizer(args: Any, trainable_params: Any) -> Any:
        fused = args.fused_backward_pass
        if not fused or not (args.optimizer_type or "").startswith("bighorn."):
            return theirs(args, trainable_params)
        _one_micro_batch(args.gradient_accumulation_steps)
        args.fused_backward_pass = False
        try:
            return theirs(args, trainable_params)
        finally:
            args.fused_backward_pass = fused

    module.get_optimizer = get_optimizer  # type: ignore[attr-defined]


def _adafactor_fused(module: ModuleType) -> None:
    """Let sd-scripts and musubi-tuner step our optimizers in backward, through Accelerate's wrapper."""
    theirs = _read(module, "patch_adafactor_fused", "optimizer")

    def patch_adafactor_fused(optimizer: Any) -> None:
        ours = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(ours, (Came, Lamb, Lars)):
            theirs(optimizer)
            return
        if ours is not optimizer:
            _one_micro_batch(optimizer.gradient_state.num_steps)
            if optimizer.scaler is not None:
                raise ValueError(
                    "fused_backward_pass steps with gradients that are still scaled, but mixed_precision is 'fp16': "
                    "use --mixed_precision bf16, or leave --fused_backward_pass out"
                )
        if (reason := ours.whole_step_reason()) is not None:
            raise ValueError(f"fused_backward_pass steps single parameters: {reason}")
        optimizer.step_param = ours.step_param

    module.patch_adafactor_fused = patch_adafactor_fused  # type: ignore[attr-defined]


def _onetrainer(name: str, module: ModuleType) -> None:
    """Replace OneTrainer's CAME or CAME8bit, whose arguments and checkpoints ours takes."""
    _read(module, name, "params", "lr", "eps", "betas", "weight_decay", "stochastic_rounding", *_OF_ONETRAINER[name])

    def make(
        params: Any,
        stochastic_rounding: bool = False,
        use_cautious: bool = False,
        quant_block_size: int | None = None,
        **options: Any,
    ) -> Came:
        del quant_block_size  # blocks have 256 elements here
        if "min_8bit_size" in options:
            options["min_8bit_size"] += 1  # theirs is the largest size without 8 bits
        rounding = "stochastic" if stochastic_rounding else "nearest"
        converted = {"weight_rounding": rounding, "cautious": bool(use_cautious)}
        if name == "CAME8bit":
            return Came.like("came8bit", params, **converted, **options)
        optimizer = Came.like("came-pytorch", params, **converted, **options)

        def keep(loaded: Any) -> None:
            for group in loaded.param_groups:
                group.update(converted)

        optimizer.register_load_state_dict_post_hook(keep)  # checkpoints of their CAME do not have these two
        return optimizer

    setattr(module, name, make)


_OF_ONETRAINER = {"CAME": ("use_cautious",), "CAME8bit": ("min_8bit_size", "quant_block_size")}


def _ai_toolkit(module: ModuleType) -> None:
    """Let `get_optimizer` make our optimizers."""
    theirs = _read(module, "get_optimizer", "params", "optimizer_type", "learning_rate", "optimizer_params")

    def get_optimizer(
        params: Any, optimizer_type: str = "adam", learning_rate: Any = 1e-6, optimizer_params: Any = None
    ) -> Any:
        start, _, name = optimizer_type.lower().partition(".")
        if start != "bighorn":
            return theirs(params, optimizer_type, learning_rate, optimizer_params)
        if name not in _OPTIMIZERS:
            raise ValueError(f"optimizer must be bighorn.Came, bighorn.Lamb or bighorn.Lars, not {optimizer_type!r}")
        return _OPTIMIZERS[name](params, lr=float(learning_rate), **(optimizer_params or {}))

    module.get_optimizer = get_optimizer  # type: ignore[attr-defined]


def _simpletuner(module: ModuleType) -> None:
    """Add our optimizers to SimpleTuner's. Its models are in bfloat16, which loses small steps without a rounding."""
    theirs = _read(module, "optimizer_parameters", "optimizer", "args")
    if not isinstance(getattr(module, "optimizer_choices", None), dict):
        _read(module, "optimizer_choices")

    def optimizer_parameters(optimizer: str, args: Any) -> Any:
        if optimizer not in module.optimizer_choices and optimizer.lower().startswith("bighorn"):
            raise ValueError(f"optimizer must be bighorn-came, bighorn-lamb or bighorn-lars, not {optimizer!r}")
        return theirs(optimizer, args)

    module.optimizer_parameters = optimizer_parameters  # type: ignore[attr-defined]
    settings = {"weight_rounding": "stochastic"}
    module.optimizer_choices.update(
        {
            f"bighorn-{name}": {"precision": "any", "default_settings": settings, "class": make}
            for name, make in _OPTIMIZERS.items()
        }
    )


def _pytorch_optimizer(module: ModuleType) -> None:
    """Add our optimizers to the package in which diffusion-pipe and others look for theirs."""
    vars(module).update({f"Bighorn{name.capitalize()}": make for name, make in _OPTIMIZERS.items()})


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "library.train_util": _sd_scripts,
    "library.adafactor_fused": _adafactor_fused,
    "musubi_tuner.modules.adafactor_fused": _adafactor_fused,
    "modules.util.optimizer.CAME": partial(_onetrainer, "CAME"),
    "modules.util.optimizer.CAME8bit": partial(_onetrainer, "CAME8bit"),
    "simpletuner.helpers.training.optimizer_param": _simpletuner,
    "toolkit.optimizer": _ai_toolkit,
    "pytorch_optimizer": _pytorch_optimizer,
}
"""The modules of trainers, with the change to each."""


class _Finder(MetaPathFinder):
    """Finds these modules as Python does, and changes each after it was executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _CHANGES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_SCRIPT = "BIGHORN_SCRIPT"
"""The environment variable with the path of the script. In a spawned process runpy puts this file into sys.argv."""

_USAGE = """\
usage: python -m bighorn.integrations.diffusion SCRIPT [arguments of the script]
       accelerate launch -m bighorn.integrations.diffusion SCRIPT [arguments of the script]
       deepspeed --module bighorn.integrations.diffusion SCRIPT [arguments of the script]

Run a script of sd-scripts, musubi-tuner, OneTrainer, SimpleTuner, ai-toolkit or diffusion-pipe with Bighorn's Came,
Lamb and Lars, which each trainer names in its own way."""


def main(arguments: list[str]) -> None:
    """Run the script named by the first argument with the other arguments, as Python would."""
    if arguments and arguments[0].startswith("--local_rank="):  # DeepSpeed's launcher writes it first
        arguments = [*arguments[1:2], arguments[0], *arguments[2:]]
    if not has_script(arguments, _USAGE):
        return
    sys.argv = arguments
    path = Path(arguments[0]).resolve()
    sys.path[0], os.environ[_SCRIPT] = str(path.parent), str(path)
    script = ModuleType("__main__")
    # With this spec, processes that the script spawns execute this file before the script.
    script.__file__, script.__spec__ = str(Path(arguments[0]).absolute()), sys.modules["__main__"].__spec__
    sys.modules["__main__"] = script
    exec(compile(path.read_bytes(), script.__file__, "exec", dont_inherit=True), vars(script))


if __name__ in ("__main__", "__mp_main__"):  # the second in a process that a script has spawned
    diffusion = importlib.import_module("bighorn.integrations.diffusion")
    if __name__ == "__main__":
        diffusion.main(sys.argv[1:])
    else:
        globals().update(runpy.run_path(os.environ[diffusion._SCRIPT], run_name=__name__))
else:
    sys.meta_path.insert(0, _Finder())
    for _name in _CHANGES.keys() & sys.modules.keys():
        _CHANGES[_name](sys.modules[_name])
