"""Registration of Lamb, Came and Lars with timm, and a command that runs timm's training script with them.

The command is `python -m bighorn.integrations.timm train.py --opt bighornlamb --lr 5e-3 ...`.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from bighorn import Lamb, Lars
from bighorn.integrations._launchers import came, has_script

__all__ = ["main", "register"]


def _timm_lamb(params: Any, **options: Any) -> Lamb:
    """Return a Lamb that computes what timm's own does."""
    return Lamb.like("timm", params, **options)


def register() -> None:
    """Register the values of `--opt`. They have no underscore, since timm looks up the part after the last one."""
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    few = {"exclude_from_layer_adaptation": "ndim<2"}  # no trust ratio for biases and norms
    infos = (
        OptimInfo("bighornlamb", Lamb, "LAMB of Bighorn", has_betas=True, defaults=few),
        OptimInfo("bighorncame", came, "CAME of Bighorn", has_betas=True, num_betas=3),
        OptimInfo("bighornlars", Lars, "LARS of Bighorn", has_momentum=True, defaults=few),
        OptimInfo("bighorntimm", _timm_lamb, "LAMB of Bighorn that computes what timm's does", has_betas=True),
    )
    for info in infos:
        default_registry.register(info)


_USAGE = """\
usage: python -m bighorn.integrations.timm SCRIPT [arguments of the script]

Run a training script of timm, such as its train.py, with four more values of --opt: bighornlamb, bighorncame,
bighornlars, and bighorntimm, which computes what timm's own lamb does."""


def main(arguments: list[str]) -> None:
    """Run the script named by the first argument with the other arguments."""
    if not has_script(arguments, _USAGE):
        return
    try:
        register()
    except ImportError as error:
        sys.exit(f"error: timm cannot be imported: {error}")
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    register()
