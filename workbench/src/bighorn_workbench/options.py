"""Click options made from the fields of a dataclass, so that name, type, default and help are declared once."""

import dataclasses
import difflib
import shlex
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from bighorn_workbench.checks import integer, number
from bighorn_workbench.errors import InputError
from bighorn_workbench.values import comma_hint, suggestion

Function = TypeVar("Function", bound=Callable[..., Any])


class FilePath(click.Path):
    """A path. An empty string is an error: ``--save "$UNSET"`` would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument to a Path."""
        if value == "":
            self.fail("the name is empty. Give the name of a file, or leave the option out.", param, ctx)
        return super().convert(value, param, ctx)


FILE = FilePath()


class Numeric(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no argument for it
    """A number. The error for one with a comma shows how to write it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = comma_hint(str(value), isinstance(self, Whole))
            raise click.BadParameter(f"{error.message}{hint}", ctx, param) from None


class Whole(Numeric, click.types.IntParamType):
    """An integer."""


class Real(Numeric, click.types.FloatParamType):
    """A number with or without a point."""


KINDS: dict[Any, "click.ParamType[Any]"] = {int: Whole(), float: Real()}
"""The types of options whose fields are numbers."""


class Name(click.Choice):  # type: ignore[type-arg]  # click 8.1 has no argument for it
    """One of some names. The error of another one suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a name as it is."""
        if value not in self.choices:
            self.fail(f"no {value!r} here; {suggestion(value, self.choices)}", param, ctx)
        return value


SECTIONS = {
    "Model and data": "task data table shapes model hf_config seed",
    "Optimizer": "optimizer optimizers baseline optimizer_option space lr lr_scaling lr_min lr_max warmup schedule "
    "weight_decay max_grad_norm state_dtype weight_rounding",
    "Length": "batch_size batch_sizes epochs steps trials budget seeds seconds target",
    "Precision and device": "precision loss_scale backend device threads processes gpu_memory accumulate "
    "tail_overlap shard_update offload clip",
    "Files": "study save resume report json_file log",
}
"""The headings of a command's help, and the options below each; others come last."""

LISTS = ("optimizers", "batch_sizes", "shapes")
"""Options whose value may be a list with commas."""


class Command(click.Command):
    """A command whose help has its options under headings, and then ``names`` of an option with what each is."""

    def __init__(self, *args: Any, names: Mapping[str, Mapping[str, str]] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.names = names or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse. Refuse an option that is given twice; for an unknown option, suggest options with similar letters."""
        try:
            self._check_once(ctx, args)
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flags = [flag[2:] for param in self.get_params(ctx) for flag in param.opts if flag.startswith("--")]
            near = difflib.get_close_matches(error.option_name.lstrip("-"), flags, n=2)
            raise click.NoSuchOption(error.option_name, possibilities=[f"--{each}" for each in near], ctx=ctx) from None

    def _check_once(self, ctx: click.Context, args: list[str]) -> None:
        """Raise an error for two values of an option with one, of which click would ignore the first."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for param in order:
            times = order.count(param)
            if times > 1 and isinstance(param, click.Option) and not (param.multiple or param.is_flag):
                flag, several = param.opts[0], " or A,B" if param.name in LISTS else ""
                raise click.UsageError(f"{flag} is given {times} times. Give it once: {flag} A{several}.", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, by :data:`SECTIONS`."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for heading, names in SECTIONS.items():
            rows = [record for name in names.split() if (record := records.pop(name, None))]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        with formatter.section("Other"):
            formatter.write_dl([record for record in records.values() if record])
        for flag, about in self.names.items():
            with formatter.section(f"Names for {flag}"):
                formatter.write_dl(list(about.items()))


MOST = 3.4e38
"""The largest float32, the dtype of the kernels' arithmetic."""

POSITIVE = partial(number, high=MOST, above=True)
COUNT = partial(integer, least=1, most=2**53)
THREADS = partial(integer, least=1, most=1024)
"""The most is far more than any CPU has. OpenMP ends the process if it has no memory for the requested threads."""


def option(
    default: Any,
    text: str,
    *,
    shown: str | None = None,
    choices: tuple[str, ...] = (),
    check: Callable[[str, Any], Any] | None = None,
    kind: "click.ParamType[Any] | None" = None,
) -> Any:
    """A field of :class:`Options` that is also a command line option (see :func:`config_options`).

    Args:
        default: The default; None if another table defines it.
        text: The help text.
        shown: The default as the help shows it, if ``default`` is None.
        choices: The values allowed; empty for any.
        check: A function that is called with the flag and a value other than None, and raises an error for a wrong one.
        kind: The type of the option, if it is neither the field's nor the choices.
    """
    about = {"help": text, "shown": shown, "choices": choices, "check": check, "kind": kind}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that are checked when an object is created.

    Raises:
        InputError: A check has refused a value.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            try:
                _check(flag_of(field.name), getattr(self, field.name), hints[field.name], **field.metadata)
            except (TypeError, ValueError) as error:
                raise InputError(str(error)) from error


def _check(
    flag: str, value: Any, hint: Any, choices: Sequence[str], check: Callable[..., Any] | None, **_: Any
) -> None:
    """Raise an error for a value of an option: a checkpoint or a caller in Python may have any."""
    kinds = typing.get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return
    several = typing.get_origin(hint) is tuple and isinstance(value, list | tuple)
    if str in kinds and not all(isinstance(word, str) for word in (value if several else (value,))):
        raise TypeError(f"{flag} {value!r} must be text.")
    if choices and value not in choices:
        raise ValueError(f"{flag} {value!r} must be one of {', '.join(choices)}.")
    if check is not None:
        check(flag, value)


def flag_of(name: str) -> str:
    """Return the command line option of a field."""
    return "--" + name.replace("_", "-")


def config_options(config: type[Any], only: Container[str] | None = None) -> Callable[[Function], Function]:
    """Add to a command one option per field of the dataclass ``config``, or per field in ``only``."""
    hints = typing.get_type_hints(config)

    def decorate(command: Function) -> Function:
        for field in reversed(dataclasses.fields(config)):
            if only is not None and field.name not in only:
                continue
            choices, shown, kind = (field.metadata[name] for name in ("choices", "shown", "kind"))
            hint = hints[field.name]
            plain = next(iter(typing.get_args(hint)), hint)  # int of `int | None`, str of `tuple[str, ...]`
            command = click.option(
                flag_of(field.name),
                type=None if hint is bool else kind or (Name(choices) if choices else KINDS.get(plain, plain)),
                is_flag=hint is bool,
                default=field.default,
                multiple=isinstance(field.default, tuple),
                show_default=shown or field.default is not None,
                help=field.metadata["help"],
            )(command)
        return command

    return decorate


def given(ctx: click.Context, config: type[Any]) -> dict[str, Any]:
    """Return the options of ``config`` that were given on the command line, by field name."""
    names = [field.name for field in dataclasses.fields(config) if field.name in ctx.params]
    return {name: ctx.params[name] for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def command_line(ctx: click.Context) -> str:
    """Return the command as it was given, without defaults."""
    return shlex.join([*ctx.command_path.split(), *words(ctx, ctx.params)])


def words(ctx: click.Context, names: Container[str]) -> list[str]:
    """Return the options with these names that were given on the command line, as text."""
    found = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in names and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            value = ctx.params[name]
            for each in value if isinstance(value, tuple) else (value,):
                found.append(parameter.opts[0])
                if each is not True:
                    found.append(f"{each:g}" if isinstance(each, float) else str(each))
    return found
