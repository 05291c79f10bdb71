"""Parameter groups from rules on names."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn import Lamb, groups
from bighorn.groups import Rule
from tests.support.tables import for_every

NO_DECAY = Rule(r"bias|norm", weight_decay=0.0, adapt=False)


def model() -> nn.Module:
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "fc": nn.Linear(4, 3), "norm": nn.LayerNorm(3)})


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


def test_the_first_rule_that_matches_takes_a_parameter_and_order_is_kept() -> None:
    made = groups.by_rules(model().named_parameters(), [Rule(r"^fc", lr=0.5), NO_DECAY])
    assert [names(group) for group in made] == [
        ["fc.weight", "fc.bias"],
        ["norm.weight", "norm.bias"],
        ["embed.weight"],
    ]
    options = [{key: value for key, value in group.items() if key != "params"} for group in made]
    assert options == [
        {"name": "^fc", "lr": 0.5},
        {"name": "bias|norm", "weight_decay": 0.0, "adapt": False},
        {"name": "everything else"},
    ]


def test_no_group_of_the_rest_where_nothing_is_left() -> None:
    made = groups.by_rules(model().named_parameters(), [NO_DECAY, Rule("")])
    assert [group["name"] for group in made] == ["bias|norm", ""]
    assert len(groups.by_rules(model().named_parameters(), [])) == 1


def test_rules_are_patterns_lists_of_them_and_functions() -> None:
    def scalars(name: str, param: Tensor) -> bool:
        return param.dim() < 2 and name.startswith("norm")

    rules = [Rule(["^embed", "fc.weight"], name="matrices"), Rule(scalars)]
    made = groups.by_rules(model().named_parameters(), rules)
    assert [group["name"] for group in made] == ["matrices", "scalars", "everything else"]
    assert [len(group["params"]) for group in made] == [2, 2, 1]
    assert repr(rules) == "[Rule('^embed|fc.weight', name='matrices'), Rule(scalars)]"


@pytest.mark.parametrize("make", [Lamb, torch.optim.AdamW, torch.optim.SGD])
def test_any_optimizer_takes_them(make: Any) -> None:
    made = groups.by_rules(model().named_parameters(), [Rule("bias|norm", weight_decay=0.0)])
    optimizer = make(copy.copy(made), lr=0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["fc.bias", "norm.weight", "norm.bias"],
        ["embed.weight", "fc.weight"],
    ]


def test_bare_parameters() -> None:
    owner = model()
    made = groups.by_rules(owner.named_parameters(), [NO_DECAY], pairs=False)
    assert [id(p) for group in made for p in group["params"]] == [
        id(owner.get_parameter(name)) for name in ("fc.bias", "norm.weight", "norm.bias", "embed.weight", "fc.weight")
    ]


def test_the_report_shows_who_took_what_before_and_after_the_optimizer() -> None:
    made = groups.by_rules(model().named_parameters(), [NO_DECAY])
    expected = """\
bias|norm: 3 parameters, 9 elements; weight_decay=0.0, adapt=False
  fc.bias [3]
  norm.weight [3]
  norm.bias [3]
everything else: 2 parameters, 32 elements
  embed.weight [5, 4]
  fc.weight [3, 4]"""
    assert groups.report(made) == expected
    after = groups.report(Lamb(made).param_groups)
    assert re.sub("; .*", "", after) == re.sub("; .*", "", expected)
    bare = groups.report(torch.optim.SGD(model().parameters(), lr=1.0).param_groups).splitlines()
    assert bare[0].startswith("group 0: 5 parameters, 41 elements; lr=1.0, ")
    assert bare[1] == "  params[0] [5, 4]"


def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"Rule\('nrom.bias', lr=0.1\) takes no parameter: .* 'norm.bias', ") as caught:
        groups.by_rules(model().named_parameters(), [NO_DECAY, Rule("nrom.bias", lr=0.1)])
    assert "fc.bias" in str(caught.value)
    with pytest.raises(ValueError, match="it was False for each of them"):
        groups.by_rules(model().named_parameters(), [Rule(lambda *_: False)])


def test_a_rule_behind_one_that_takes_everything_is_refused() -> None:
    message = (
        r"Rule\('norm', lr=0.1\) takes no parameter: rules before it took the 2 .* \(norm.weight, norm.bias\); put"
    )
    with pytest.raises(ValueError, match=message):
        groups.by_rules(model().named_parameters(), [NO_DECAY, Rule("norm", lr=0.1)])


def twice() -> Iterator[tuple[str, Tensor]]:
    yield from model().named_parameters()
    yield from model().named_parameters()


def tied() -> Iterator[tuple[str, Tensor]]:
    weight = nn.Parameter(torch.ones(2))
    yield from (("a", weight), ("b", weight))


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no names": (model().parameters(), [], TypeError, r"pass model.named_parameters\(\), not Parameter in a"),
    "a model": (model(), [], TypeError, r"pass model.named_parameters\(\), not ModuleDict"),
    "used up": (iter(()), [], ValueError, "named_parameters is empty"),
    "same name": (twice(), [], ValueError, "two parameters are called 'embed.weight'"),
    "same parameter": (tied(), [], ValueError, "'a' and 'b' are the same parameter"),
    "no rule": (model().named_parameters(), ["bias"], TypeError, "rules must be a list of Rule, not of str"),
    "one rule": (model().named_parameters(), NO_DECAY, TypeError, "rules must be a list of Rule, not a Rule"),
}


@for_every("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    params, rules, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        groups.by_rules(params, rules)


@for_every(
    ("match", "options", "kind", "message"),
    [
        (3, {}, TypeError, "match must be regular expressions in a list, 'ndim<2' or a callable"),
        ("(", {}, ValueError, r"match: '\(' is not a regular expression"),
        ([], {}, ValueError, r"match=\[\] matches nothing"),
        (None, {}, ValueError, "match=None matches nothing"),
        ("bias", {"params": []}, TypeError, "a Rule got 'params'"),
        ("bias", {"param_names": []}, TypeError, "a Rule got 'param_names'"),
    ],
)
def test_a_wrong_rule_is_refused(match: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Rule(match, **options)


def test_the_report_wants_groups() -> None:
    with pytest.raises(ValueError, match=r"groups\[0\] has no 'params', but 'lr'"):
        groups.report([{"lr": 0.1}])
    with pytest.raises(TypeError, match=r"as optimizer.param_groups, not a Lamb"):
        groups.report(Lamb(model().parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"as optimizer.param_groups, not of a Parameter"):
        groups.report(model().parameters())  # type: ignore[arg-type]


def test_what_starts_at_zero_is_excluded_and_nothing_else() -> None:
    """From the second step on, LAMB moves such a tensor by lr times its norm, and an excluded one by about lr."""

    def adapter() -> nn.Module:
        torch.manual_seed(0)
        made = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("lora_A", "lora_B", "lora_B_x", "base")})
        for name, param in made.named_parameters():
            if name in ("lora_B.weight", "base.weight"):
                nn.init.zeros_(param)
        made["base"].requires_grad_(False)
        return made

    made = adapter()
    wrapped = nn.Module()
    wrapped.module = made
    found = groups.zero_initialized(made.named_parameters())
    assert found == groups.zero_initialized(wrapped.named_parameters()) == [r"^lora_B\.weight$"]
    moved = []
    for model, excluded in ((made, found), (adapter(), None)):
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        optimizer = Lamb(named, lr=0.01, exclude_from_layer_adaptation=excluded)
        for _ in range(10):
            for _, param in named:
                param.grad = torch.ones_like(param)
            optimizer.step()
        moved.append({name: float(param.detach().norm()) for name, param in named})
    assert moved[0]["lora_B.weight"] == pytest.approx(0.4, rel=1e-3)  # 10 steps of 0.01 in 16 elements
    assert moved[1]["lora_B.weight"] == pytest.approx(0.04 * 1.01**9, rel=1e-3)
    assert moved[0]["lora_B_x.weight"] == moved[1]["lora_B_x.weight"]
    assert groups.zero_initialized(nn.Linear(2, 2).named_parameters()) == []


def test_what_has_no_values_cannot_be_zero() -> None:
    with pytest.raises(ValueError, match=r"'weight' is on the meta device and has no values yet: initialize"):
        groups.zero_initialized(nn.Linear(2, 2, device="meta").named_parameters())
    with pytest.raises(TypeError, match=r"pass model.named_parameters\(\), not Linear"):
        groups.zero_initialized(nn.Linear(2, 2))  # type: ignore[arg-type]
