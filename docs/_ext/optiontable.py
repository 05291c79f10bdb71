"""```{option-table} CLASS: the arguments of a class as tables, by subject, each with its type, default and meaning.

Types and defaults come from the signature and meanings from the docstring, whose own list of arguments the page then
leaves out. An argument that is in no group, or in two, fails the build.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

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
TABLED: set[str] = set()
"""The classes whose arguments are in a table."""


def meanings(kind: type[Any]) -> dict[str, str]:
    """The entry of each argument in a class's docstring, without the default that the signature has."""
    text = inspect.getdoc(kind) or ""
    [body] = re.findall(r"^Args:\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^    (\w+): (.*?)(?=\n    \w|\Z)", body, re.DOTALL | re.MULTILINE)
    return {name: re.sub(r" Default: .*$", "", " ".join(entry.split())) for name, entry in found}


def type_words(annotation: object) -> str:
    """A type as it is read: without modules, and the long alternatives of lr by their names."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace("torch.dtype", "dtype").replace(" | ", " or ")


class OptionTable(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        kind = getattr(import_module(module), name)
        TABLED.add(self.arguments[0])
        said, signature = meanings(kind), inspect.signature(kind)
        listed = [word for words in SUBJECTS.values() for word in words.split() if word in said]
        if sorted(listed) != sorted(said):
            raise self.error(f"no subject, or two, for {sorted(set(said) ^ set(listed))}")
        lines: list[str] = []
        for subject, words in SUBJECTS.items():
            mine = [word for word in words.split() if word in said]
            if not mine:
                continue
            lines += [f"**{subject}**", "", "| option | type, default | meaning |", "|---|---|---|"]
            for word in mine:
                parameter = signature.parameters[word]
                default = "" if parameter.default is parameter.empty else f", `{parameter.default!r}`"
                meaning = said[word].replace("|", "\\|")
                lines.append(f"| `{word}` | {type_words(parameter.annotation)}{default} | {meaning} |")
            lines.append("")
        node = nodes.Element()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), self.content_offset, node)
        return list(node.children)


def shorten(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Leave the list of arguments out of a docstring whose page has the table."""
    del app, thing, options
    if what != "class" or name not in TABLED or "Args:" not in lines:
        return
    start = lines.index("Args:")
    end = next((i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    del lines[start:end]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("option-table", OptionTable)
    app.connect("autodoc-process-docstring", shorten, priority=100)  # before napoleon
    return {"parallel_read_safe": False, "parallel_write_safe": True}
