"""Functions that read and check the values of options."""

import ast
import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from textwrap import shorten
from typing import Any, TypeVar

import torch

from bighorn import FixedScale, WindowScale
from bighorn_workbench.errors import InputError

Number = TypeVar("Number", int, float)
Value = TypeVar("Value")

COMMAND_ARGUMENTS = (
    *("lr", "weight_decay", "backend", "state_dtype", "params", "max_grad_norm", "grad_norm_group", "names"),
)
"""Arguments of an optimizer that other options of the command set, so that ``--optimizer-option`` cannot."""


def comma_hint(text: str, whole: bool = False) -> str:
    """Return a sentence on how to write a number with a comma; "" for other text.

    Example:
        >>> comma_hint("0,01"), comma_hint("1,000", whole=True), comma_hint("0.01")
        (' Write 0.01, with a point.', ' Write 1000, without a comma.', '')
    """
    if whole:
        thousands = re.fullmatch(r"\d{1,3}(,\d{3})+", text)
        return f" Write {text.replace(',', '')}, without a comma." if thousands else ""
    decimal = re.fullmatch(r"[+-]?\d*,\d+(e[+-]?\d+)?[ %a-z]*", text, re.IGNORECASE)
    return f" Write {text.replace(',', '.')}, with a point." if decimal else ""


def counted(count: float, noun: str) -> str:
    """Return a number of things in words.

    Example:
        >>> counted(1, "epoch"), counted(0.5, "epoch"), counted(3, "seed")
        ('1 epoch', '0.5 epochs', '3 seeds')
    """
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun}{'' if count == 1 else 's'}"


def amount(units: Mapping[str, int], like: str, flag: str, text: str) -> float:
    """Return the number that a text like ``1.5 h`` names in one of some units; without one it is whole, or zero."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) ?(%|[A-Za-z]*)", text.strip())
    number, unit = found.groups() if found else ("", "?")
    if unit not in units or ("." in number and not unit) or not (float(number) or "" in units):
        raise InputError(f"{flag} {text!r} is not {like}.{comma_hint(text)}")
    return float(number) * units[unit]


SIZES = {f"{letter}{i}B": (1024 if i else 1000) ** power for power, letter in enumerate("MGT", 2) for i in ("", "i")}
bytes_in = partial(amount, SIZES, "a size like 24GB, 80GiB or 512MB")
seconds_in = partial(amount, {"s": 1, "min": 60, "h": 3600, "d": 86400}, "a time like 2h, 90min or 1.5d")


def device_package(name: str) -> str | None:
    """Return the package of a device, such as ``torch_npu`` of ``npu:0``, if it is installed."""
    kind = name.partition(":")[0]
    return f"torch_{kind}" if kind.isidentifier() and find_spec(f"torch_{kind}") else None


def device_of(name: str) -> torch.device:
    """Return a device of torch by its name, such as ``cuda`` or ``npu:0``; its package, as torch_xla, is imported.

    Raises:
        InputError: torch has no such device here.
    """
    kind, package = name.partition(":")[0], device_package(name)
    if kind == "cuda" and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise InputError(
            f"--device {name}: torch sees no CUDA device here (torch {torch.__version__} {built}). Use a machine with "
            "one, or --device cpu."
        )
    try:
        if package is not None:
            import_module(package)  # torch_xla 2.9 does not register itself with torch
        tensor = torch.ones(1, device=name)
        tensor.cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = shorten(str(error).partition("\n")[0], 120)
        raise InputError(f"--device {name}: torch has no such device here ({reason}). Or use --device cpu.") from error
    return tensor.device


def listed(flag: str, text: str, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """Read values between commas, each once."""
    values = tuple(read(word.strip()) for word in text.split(","))
    if len(set(values)) < len(values):
        raise InputError(f"{flag} {text!r} names something twice.")
    return values


def numbers(flag: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Read positive numbers, each once.

    Example:
        >>> numbers("--batch-sizes", "256,32", int)
        (256, 32)
    """

    def positive(word: str) -> Number:
        with suppress(ValueError):
            if 0 < (value := kind(word)) < math.inf:
                return value
        raise InputError(f"{flag} {text!r} is not a list of positive numbers like 1,2,3.")

    return listed(flag, text, positive)


def check_name(flag: str, name: str, allowed: Collection[str]) -> str:
    """Return a name that is in ``allowed``; raise an error for another one."""
    if name not in allowed:
        raise InputError(f"{flag}: no {name!r} here; {suggestion(name, allowed)}")
    return name


def suggestion(name: str, allowed: Collection[str]) -> str:
    """Return the name in ``allowed`` nearest to a wrong one, or else all of them.

    Example:
        >>> suggestion("adamW8bit", ["adam", "adamw"]), suggestion("shampoo", ["adam", "adamw"])
        ('did you mean adamw?', 'there are adam, adamw.')
    """
    lowered = {each.lower(): each for each in allowed}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"did you mean {lowered[near[0]]}?" if near else f"there are {', '.join(allowed)}."


def names(flag: str, text: str, allowed: Collection[str]) -> tuple[str, ...]:
    """Read names out of ``allowed``, each once.

    Example:
        >>> names("--optimizers", "lamb, adamw", ["sgd", "adamw", "lamb"])
        ('lamb', 'adamw')
    """
    return listed(flag, text, partial(check_name, flag, allowed=allowed))


def warmup_steps(warmup: str, total: int) -> int:
    """Read ``--warmup``, given as steps (``"200"``) or as a share of the run (``"10%"``).

    Example:
        >>> warmup_steps("10%", total=200), warmup_steps("15", total=200)
        (20, 15)
    """
    like = "a number of steps (200) or a share of the run (0% to 100%)"
    number = amount({"": 1, "%": 1}, like, "--warmup", warmup)
    return round(number / 100 * total if "%" in warmup else number)


def scale_policy(text: str | None) -> FixedScale | WindowScale | None:
    """Read ``--loss-scale``; None means no loss scaling.

    Example:
        >>> scale_policy("1024")
        FixedScale(init_scale=1024.0)
    """
    if text is None or text == "none":
        return None
    if text == "dynamic":
        return WindowScale()
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 1 <= scale <= torch.finfo(torch.float32).max:
        raise InputError(
            f"--loss-scale {text} is neither none, dynamic nor a number of at least 1, such as 1024.{comma_hint(text)}"
        )
    return FixedScale(scale)


def assigned(flag: str, form: str, like: str, texts: Sequence[str]) -> dict[str, str]:
    """Read ``NAME=VALUE``, each name once; ``form`` is the pattern of a name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(form, name):
            raise InputError(f"{flag} {text!r} is not of the form {like}.")
        if name in found:
            raise InputError(f"{flag} {text!r}: {name} is given twice.")
        found[name] = value
    return found


def read_options(texts: Sequence[str]) -> Mapping[str, Any]:
    """Read ``--optimizer-option NAME=VALUE``; the value is a Python literal or a bare word.

    Example:
        >>> read_options(["bias_correction=True", "betas=(0.9, 0.99, 0.999)", "factor=last_two"])
        {'bias_correction': True, 'betas': (0.9, 0.99, 0.999), 'factor': 'last_two'}
    """
    options: dict[str, Any] = {}
    like = "NAME=VALUE like bias_correction=True"
    for name, value in assigned("--optimizer-option", r"(?!\d)\w+", like, texts).items():
        if name in COMMAND_ARGUMENTS:
            raise InputError(f"--optimizer-option {name}={value}: {name} is set by the command itself; see its --help.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # of brackets or signs, too many of them
            options[name] = value
    return options
