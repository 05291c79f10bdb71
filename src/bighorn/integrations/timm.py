"""Registration of Lamb and Came with timm, and a command that runs timm's training script with them.

The command is `python -m bighorn.integrations.timm train.py --opt bighornlamb --lr 5e-3 ...`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from typing import Any

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry

from bighorn import Came, Lamb


def came(
    params: Any, betas: Iterable[float] = (), eps: float | tuple[float, float] | None = None, **options: Any
) -> Came:
    """Return a Came from the arguments of timm's command line.

    Args:
        params: The parameters or groups.
        betas: Decay of the averages, as `--opt-betas` gives them; those that are left out are Came's own. Default: ().
        eps: The number that `--opt-eps` gives, which is added to the squared gradient, or both of Came's. Default:
            None.
        **options: Other options of `Came`.
    """
    betas = tuple(betas)
    options["betas"] = (*betas, *(0.9, 0.999, 0.9999)[len(betas) :])
    if eps is not None:
        options["eps"] = (eps, 1e-16) if isinstance(eps, (int, float)) else eps
    return Came(params, **options)


def timm_lamb(params: Any, **options: Any) -> Lamb:
    """Return a Lamb that computes what timm's own does."""
    return Lamb.like("timm", params, **options)


def register() -> None:
    """Register the values of `--opt`. They have no underscore, since timm looks up the part after the last one."""
    infos = (
        OptimInfo("bighornlamb", Lamb, "LAMB of Bighorn", has_betas=True),
        OptimInfo("bighorncame", came, "CAME of Bighorn", has_betas=True, num_betas=3),
        OptimInfo("bighorntimm", timm_lamb, "LAMB of Bighorn that computes what timm's does", has_betas=True),
    )
    for info in infos:
        default_registry.register(info)


register()

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m bighorn.integrations.timm train.py [arguments of train.py]")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
