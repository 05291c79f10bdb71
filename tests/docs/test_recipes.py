"""The recipe that moves the state off the device takes the same steps as a training without the moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bighorn import Came, Lamb
from tests.device import stand_in
from tests.device.devices import begin
from tests.docs.test_docs import ROOT, blocks
from tests.support.ranks import call_on_ranks

[RECIPE] = [block for block in blocks((ROOT / "docs" / "recipes.md").read_text()) if "def move_state" in block]


def trainings_are_equal(kind: type[Lamb] | type[Came], options: dict[str, object], device: str) -> None:
    recipe: dict[str, object] = {}
    exec(compile(RECIPE, "recipes.md", "exec"), recipe)
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(64, 128).to(device)
        optimizer = kind(net.named_parameters(), lr=0.01, **options)  # type: ignore[arg-type]
        for step in range(4):
            net(torch.linspace(-1, 1, 512).view(8, 64).to(device) * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                move = recipe["move_state"]
                assert callable(move)
                move(optimizer, "cpu")
                assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}
                move(optimizer, device)
        ends.append([param.detach().cpu() for param in net.parameters()])
    assert all(one.equal(other) for one, other in zip(*ends, strict=True))


@pytest.mark.process
@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8", "min_8bit_size": 1}], ids=["fp32", "int8"])
@pytest.mark.parametrize("kind", [Lamb, Came])
def test_moving_the_state_changes_no_bit(kind: type[Lamb] | type[Came], options: dict[str, object]) -> None:
    if reason := stand_in.why_absent():
        pytest.skip(reason)
    arguments = {"kind": kind, "options": options, "device": "npu"}
    call_on_ranks(trainings_are_equal, arguments, 1, (begin, stand_in.COMPLETE))
