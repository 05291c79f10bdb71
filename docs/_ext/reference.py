"""The API reference as Markdown, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any

from bighorn import compat
from bighorn._optim.optimizer import KernelOptimizer

WIDTH = 84
"""The characters of a line of code that a page shows."""

OURS = "bighorn", "bighorn_workbench"
SHARED = {KernelOptimizer}
"""Classes whose methods have a place of their own, since several public classes inherit them."""

SUBJECTS = {
    "Parameters and rates": "params lr betas momentum eps weight_decay",
    "The rule": "adam hyperball bias_correction grad_averaging decay_mode corrected_weight_decay always_adapt "
    "weight_norm_bounds trust_ratio_bounds "
    "second_moment cautious nesterov trust_coefficient denominator trust_clip lr_in_momentum clip_threshold factor "
    "decay_rate scale_parameter scale_eps maximize",
    "Gradients": "max_grad_norm skip_nonfinite grad_norm_group",
    "Parameters by name": "exclude_from_weight_decay exclude_from_layer_adaptation names",
    "Precision and memory": "state_dtype min_8bit_size weight_rounding rounding_seed",
    "Where it runs": "backend",
}
"""The options of Lamb, Came and Lars by subject."""

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):\n((?:[ ].*\n?|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}([\w*]+): (.*?)(?=\n {4}\S|\Z)", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r":\w+:(`[^`]+`)|``([^`]+)``")


def public() -> Iterator[tuple[str, object]]:
    """Yield every name in an `__all__` that users import from: the package, its public modules and the faces."""
    faces = [f"bighorn.compat.{found.name}" for found in pkgutil.iter_modules(compat.__path__) if found.name[0] != "_"]
    for module in map(importlib.import_module, ["bighorn", *faces]):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                yield from ((f"{thing.__name__}.{inner}", getattr(thing, inner)) for inner in thing.__all__)
            elif name != "__version__":
                yield f"{module.__name__}.{name}", thing


def found(path: str) -> Any:
    """Return what a dotted name stands for."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def text_of(thing: object) -> str:
    """Return a docstring as Markdown."""
    return ROLE.sub(lambda match: match[1] or f"`{match[2]}`", inspect.getdoc(thing) or "")


def sections(text: str) -> dict[str, str]:
    """Return the parts of a docstring by their headings; what stands before and between them has none."""
    parts = {name: textwrap.dedent(body).strip() for name, body in SECTION.findall(f"{text}\n")}
    return {"": SECTION.sub("", f"{text}\n").strip(), **parts}


def entries(text: str) -> dict[str, str]:
    """Return the entries of a list of arguments, each in one line."""
    return {name: " ".join(words.split()) for name, words in ENTRY.findall(textwrap.indent(text, " " * 4))}


def meanings(kind: type[Any]) -> dict[str, str]:
    """Return the meaning of each argument of a class, without the default that the signature has."""
    said = entries(sections(text_of(kind)).get("Args", ""))
    return {name: without_default(words) for name, words in said.items()}


def without_default(words: str) -> str:
    """Return the meaning of an argument without a default that a table has elsewhere, unless it is explained."""
    return re.sub(r" ?Default: (?!.*\bwhich\b).*$", "", words)


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|")


def type_words(annotation: object) -> str:
    """Return a type without its modules."""
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, str):
        text = annotation
    elif inspect.isclass(annotation) and not typing.get_args(annotation):
        text = annotation.__name__
    else:
        text = re.sub(r"~|\b(?:\w+\.)+(?=\w)", "", str(annotation))
    return text.replace("torch.dtype", "dtype").replace("typing.", "").replace(" | ", " or ")


def default_words(value: object) -> str:
    """Return a default as code has it."""
    words = repr(value).replace("'", '"')
    return "..." if words.startswith("<") else words


def parameters(thing: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable, without self, cls and the catch-all for unknown options."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return {}
    return {name: each for name, each in signature.parameters.items() if name not in ("self", "cls", "unknown")}


def returned(thing: Any) -> str:
    """Return an arrow and the type that a function returns; nothing for a class, and for None."""
    if inspect.isclass(thing):
        return ""
    annotation = inspect.signature(thing).return_annotation
    words = type_words(annotation).replace(" or ", " | ")
    if inspect.isgeneratorfunction(inspect.unwrap(thing)) and not inspect.isgeneratorfunction(thing):
        words = words.replace("Iterator[", "ContextManager[")  # contextlib.contextmanager
    return "" if words in ("", "None") else f" -> {words}"


def signature_lines(name: str, thing: Any) -> list[str]:
    """Return a call with all defaults, and the type that it returns, wrapped as code."""
    words, keyword_only = [], False
    for each in parameters(thing).values():
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            words += ["*"]
        keyword_only = keyword_only or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        star = "**" if each.kind is each.VAR_KEYWORD else "*" if each.kind is each.VAR_POSITIONAL else ""
        default = "" if each.default is each.empty else f"={default_words(each.default)}"
        words.append(f"{star}{each.name}{default}")
    line = f"{name}({', '.join(words)}){returned(thing)}"
    if len(line) <= WIDTH:
        return [line]
    inside = textwrap.indent(textwrap.fill(", ".join(words), WIDTH - 4), " " * 4)
    return [f"{name}(", inside, f"){returned(thing)}"]


def arguments(thing: Any, said: dict[str, str]) -> list[str]:
    """Return the arguments of a callable as a table."""
    lines, given = ["| argument | type, default | meaning |", "|---|---|---|"], parameters(thing)
    for name, words in said.items():
        lines.append(f"| `{name}` | {kind_and_default(given.get(name.lstrip('*')))} | {cell(words)} |")
    return [*lines, ""]


def attributes(kind: Any, said: dict[str, str]) -> list[str]:
    """Return the attributes of a class as a table."""
    given, types = parameters(kind), dict[str, object]()
    for one in reversed(kind.__mro__):
        types |= inspect.get_annotations(one)
        types |= {
            name: inspect.signature(each.fget).return_annotation
            for name, each in vars(one).items()
            if isinstance(each, property) and each.fget is not None and inspect.isfunction(each.fget)
        }
    cells = {name: kind_and_default(given.get(name)) or cell(type_words(types.get(name, ""))) for name in said}
    defaults = any(given[name].default is not inspect.Parameter.empty for name in said if name in given)
    lines = [f"| attribute | {'type, default' if defaults else 'type'} | meaning |", "|---|---|---|"]
    return [*lines, *(f"| `{name}` | {cells[name]} | {cell(words)} |" for name, words in said.items()), ""]


def kind_and_default(parameter: inspect.Parameter | None) -> str:
    """Return the type of a parameter and its default."""
    if parameter is None:
        return ""
    default = "" if parameter.default is parameter.empty else f"`{default_words(parameter.default)}`"
    return cell(", ".join(filter(None, (type_words(parameter.annotation), default))))


def options(path: str) -> list[str]:
    """Return the options of an optimizer as tables by subject.

    Raises:
        ValueError: An option is in no subject, or in two.
    """
    kind = found(path)
    said, given = meanings(kind), parameters(kind)
    listed = [word for words in SUBJECTS.values() for word in words.split() if word in said]
    if sorted(listed) != sorted(said):
        raise ValueError(f"{path} has no subject, or two, for {sorted(set(said) ^ set(listed))}: see SUBJECTS")
    lines = []
    for subject, words in SUBJECTS.items():
        mine = [word for word in words.split() if word in said]
        if mine:
            lines += [f"**{subject}**", "", "| option | type, default | meaning |", "|---|---|---|"]
            lines += [f"| `{word}` | {kind_and_default(given[word])} | {cell(said[word])} |" for word in mine] + [""]
    return lines


def members(kind: type[Any], last: Callable[[type[Any]], bool]) -> dict[str, Any]:
    """Return the public methods and properties with a docstring of a class, and of its bases up to a last one."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        if one is not kind and last(one):
            break
        for name, member in vars(one).items():
            thing = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            # torch writes a wrapper of `step` into the class of an optimizer that was constructed.
            own = inspect.isfunction(thing) and thing.__qualname__ == f"{one.__qualname__}.{name}"
            if name[0] != "_" and inspect.getdoc(thing) and (isinstance(thing, property) or own):
                found.setdefault(name, thing)
    return found


def is_documented(kind: type[Any]) -> bool:
    """Whether the methods of a class have a place elsewhere in the reference, or are another package's."""
    ours = kind.__module__.partition(".")[0] in OURS
    return not ours or kind in SHARED or any(kind is thing for _, thing in public())


def methods(path: str, name: str = "", level: int = 3) -> list[str]:
    """Return the reference of the methods of a class."""
    kind = found(path)
    lines = []
    for method, member in sorted(members(kind, is_documented).items()):
        lines += [f"{'#' * level} {f'{name}.' if name else ''}{method}", ""]
        lines += [] if isinstance(member, property) else ["```text", *signature_lines(method, member), "```", ""]
        lines += body(member)
    return lines


def body(thing: Any, tabled: bool = False) -> list[str]:
    """Return what a docstring says, with its arguments as a table unless the page has one of them."""
    parts = sections(text_of(thing))
    lines = [parts[""], ""]
    for heading, table in (("Args", arguments), ("Attributes", attributes)):
        said = entries(parts.get(heading, ""))
        if said and not tabled:
            lines += table(thing, {name: without_default(words) for name, words in said.items()})
    if "Returns" in parts:
        lines += [f"**Returns:** {' '.join(parts['Returns'].split())}", ""]
    if "Raises" in parts:
        lines += ["**Raises:**", ""]
        lines += [f"* `{name}`: {words}" for name, words in entries(parts["Raises"]).items()] + [""]
    if "Example" in parts:
        lines += ["<!-- fmt: off -->", "```pycon", parts["Example"], "```", "<!-- fmt: on -->", ""]
    return lines


def is_made_by_others(kind: type[Any]) -> bool:
    """Whether users do not call a class: a Protocol, or its docstring has attributes but not its arguments."""
    said = sections(text_of(kind))
    undocumented = parameters(kind).keys() - entries(said.get("Attributes", "")).keys()
    return bool(getattr(kind, "_is_protocol", False) or ("Attributes" in said and "Args" not in said and undocumented))


def reference(path: str, level: int = 3, tabled: bool = False) -> list[str]:
    """Return the reference of a class, a function or a constant.

    Raises:
        ValueError: It has no docstring.
    """
    thing, mark = found(path), "#" * level
    lines = [f"{mark} {path}", ""]
    if isinstance(thing, tuple):
        names = ", ".join(f"`{each.name}`" for each in thing)
        return [*lines, f"The presets of `like`, each a `bighorn.Preset`: {names}.", ""]
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return [*lines, variable_words(path), ""]
    if not inspect.getdoc(thing):
        raise ValueError(f"the public name {path} has no docstring")
    if not (inspect.isclass(thing) and (issubclass(thing, Exception | Warning) or is_made_by_others(thing))):
        lines += ["```text", *signature_lines(path.rpartition(".")[2], thing), "```", ""]
    lines += body(thing, tabled)
    if inspect.isclass(thing) and not issubclass(thing, Exception | Warning):
        lines += methods(path, path.rpartition(".")[2], level + 1)
    return lines


def variable_words(path: str) -> str:
    """Return the string below the assignment of a public variable."""
    module, _, name = path.rpartition(".")
    match = re.search(rf'^{name} = .*\n"""(.*?)"""', inspect.getsource(importlib.import_module(module)), re.MULTILINE)
    assert match is not None, f"the public name {path} has no docstring"
    return match[1]
