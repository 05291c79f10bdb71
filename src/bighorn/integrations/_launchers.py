"""What the launchers of scripts share: Came's arguments on a command line, and the script's path."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bighorn import Came


def came(params: Any, betas: Iterable[float] = (), eps: float | Iterable[float] | None = None, **options: Any) -> Came:
    """Return a Came from the arguments of a command line that knows Adam's.

    Args:
        params: The parameters or groups.
        betas: Decay of the averages; those that are left out are Came's own. Default: ().
        eps: The number that is added to the squared gradient, or both of Came's. Default: None.
        **options: Other options of `Came`.

    Raises:
        TypeError: As for `Came`.
        ValueError: As for `Came`.
    """
    betas = tuple(betas)
    options["betas"] = (*betas, *(0.9, 0.999, 0.9999)[len(betas) :])
    if eps is not None:
        options["eps"] = (eps, 1e-16) if isinstance(eps, (int, float)) else eps
    return Came(params, **options)


def has_script(arguments: list[str], usage: str) -> bool:
    """Whether the first argument of a command is a script; False after a request for help, which is answered.

    Args:
        arguments: The arguments of the command.
        usage: Its usage, which `-h` and `--help` print.

    Raises:
        SystemExit: It is no file.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage)
        return False
    if not arguments or not Path(arguments[0]).is_file():
        sys.exit(f"{usage}\n\nerror: {arguments[0] + ' is no file' if arguments else 'SCRIPT is missing'}")
    return True
