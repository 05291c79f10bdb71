"""LAMB without its trust ratio equals torch's Adam and AdamW; `test_presets.py` has other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bighorn import Lamb
from tests.support.case_tensors import Leaf
from tests.support.cases import Case, leaves_out, serving
from tests.support.peer_runs import largest_difference, starts, train
from tests.support.tables import for_every

CASE = Case(
    "witnesses",
    {},
    (
        Leaf("tiny", (7, 5), grad="tiny"),
        Leaf("vector", (17,)),
        Leaf("page", (4097,)),
        Leaf("one", (1,)),
        Leaf("conv", (3, 2, 3, 3)),
    ),
)

Make = Callable[..., torch.optim.Optimizer]

AMSGRAD, L2, DECOUPLED = {"second_moment": "amsgrad"}, {"decay_mode": "l2"}, {"decay_mode": "decoupled"}
DECAY, UP = {"weight_decay": 0.1}, {"maximize": True}
ADAM: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}, {}),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}, AMSGRAD),
    "adam-l2": (torch.optim.Adam, DECAY, DECAY | L2),
    "adam-l2-maximize": (torch.optim.Adam, DECAY | UP, DECAY | UP | L2),
    "adam-eps": (torch.optim.Adam, {"eps": 1e-2}, {"eps": 1e-2}),
    "adamw": (torch.optim.AdamW, DECAY, DECAY | DECOUPLED),
    "adamw-amsgrad-maximize": (torch.optim.AdamW, DECAY | UP | {"amsgrad": True}, DECAY | UP | DECOUPLED | AMSGRAD),
    "adamw-betas": (torch.optim.AdamW, DECAY | {"betas": (0.5, 0.9)}, DECAY | DECOUPLED | {"betas": (0.5, 0.9)}),
}


@for_every("id_", ADAM)
def test_degenerate_mode_is_torchs_adam(id_: str, backend: str) -> None:
    make, theirs, ours = ADAM[id_]
    if leaves_out(backend, ours):
        return
    for dtype, bound in ((torch.float64, 4e-15), (torch.float32, 4e-7)):
        results = []
        mine = {"adam": True, "backend": serving(backend, dtype), **ours}
        for kind, options in ((make, theirs), (Lamb, mine)):
            params = starts(CASE, dtype)
            train(CASE, kind(params, **{"lr": 0.1, "eps": 1e-8, **options}), params)
            results.append(params)
        assert largest_difference(CASE, results[1], results[0]) <= bound, dtype
