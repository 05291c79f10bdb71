"""What fails on the stand-in today, and the place in src/bighorn that has to be mended.

Who mends a place sees its tests pass, which is a failure as long as they are in the table, and deletes the row.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.device import stand_in


class KnownError(AssertionError):
    """A failure that the table expects; every other failure of the same test is one."""


class Row(NamedTuple):
    """Tests that fail, the place of the cause, what is wrong there, and what the failure says."""

    tests: str
    place: str
    wrong: str
    says: str


NONE, LESS = "no float64", "float64 becomes float32"
EITHER = f"({NONE}|{LESS})"
BACKEND = "(foreach|reference)"
OUT_OF_RANGE = (
    "lamb-(large|small)-(gradients-clipped|weights)",
    "came-(large|small)-gradients-clipped",
    "lars-((large|small)-(gradients-clipped|weights)|large-gradients)",
)
LOOPS = "a_training|16_bit_weights|gradient_release|telemetry|checkpoints|fsdp2"
REFUSED = "does not support float64"
NO_NORM = "\"linalg_vector_norm\" not implemented for 'Double'"
NORM = "norms are taken of float64, which a conversion does not give there"

BROKEN = [
    # ---- the range of float32's squares ----
    Row(
        rf"norms_neither_.*\[{EITHER}-({'|'.join(OUT_OF_RANGE)})-{BACKEND}\]",
        "kernels/arithmetic.py square_sum(), kernels/foreach/pieces.py Workspace.square_sums()",
        "squares in float32 overflow or vanish without a word, where float64 is not there",
        f"AssertionError: (x|exp_avg|skipped)|{REFUSED}|{NO_NORM}",
    ),
    # ---- memory of the host that is not pinned ----
    Row(
        r"sends_nothing\[.*came-stochastic\]",
        "kernels/foreach/came.py Batch.__init__()",
        "keys and offsets are sent from pageable memory at each step",
        f"{stand_in.PAGEABLE}|{REFUSED}",
    ),
    Row(
        r"a_gradient_is_missing\[.*(lamb|lars)\]",
        "kernels/bucket.py Bucket.with_grad(), kernels/foreach/layerwise.py LayerwiseStepper.step()",
        "the metrics are indexed with a list, which torch sends from pageable memory",
        f"{stand_in.PAGEABLE}|{REFUSED}|{NO_NORM}",
    ),
    # ---- float64 by name ----
    Row(
        rf"a_training\[{EITHER}-(lamb|came|lars)-centralised\]",
        "optim/centring.py square_sum()",
        "it names float64",
        f"{REFUSED}|{NO_NORM}",
    ),
    Row(
        rf"(a_scaled_loss|our_scaler_waits_for_nothing)\[{NONE}-",
        "optim/step_plan.py scale_and_mask(), after kernels/arithmetic.py wide()",
        "it names float64",
        f"{REFUSED}|{NO_NORM}",
    ),
    Row(
        rf"offload\[{EITHER}-own-clip-",
        "offloading/step.py norms()",
        "it names float64",
        f"{REFUSED}|{NO_NORM}",
    ),
    Row(
        rf"a_scaler_with_an_optimizer_of_torch\[{NONE}-bighorn",
        "scaling/scaler.py LossScaler",
        "it inherits `unscale_` from torch's class, which uses float64 on all devices but Apple's",
        REFUSED,
    ),
    Row(
        rf"(equals_the_float64_reference|norms_neither_|sends_nothing|is_missing|faces|{LOOPS}).*\[{NONE}-(?!adamw)",
        "kernels/arithmetic.py wide()",
        "it knows devices without float64 by the name 'mps' alone",
        REFUSED,
    ),
    Row(
        rf"equals_the_float64_reference\[{LESS}-(?!came-).*-foreach\]",
        "kernels/arithmetic.py wide()",
        NORM,
        NO_NORM,
    ),
    Row(
        rf"(norms_neither_|sends_nothing|our_scaler|a_scaled_loss|{LOOPS}).*\[{LESS}-(lamb|lars)(?!.*-reference\])",
        "kernels/arithmetic.py wide()",
        NORM,
        NO_NORM,
    ),
    Row(
        rf"faces\[{LESS}-(NpuFusedLamb|mindspore-Lamb|npu_bridge|pytorch_fused_lamb)",
        "kernels/arithmetic.py wide()",
        NORM,
        NO_NORM,
    ),
    # ---- calls of torch ----
    Row(
        r"of_the_order_of_adamws\[(?!adamw|lamb-clip)",
        "kernels/foreach",
        "codecs, roundings and masks are computed for each tensor by itself",
        r"AssertionError: \d+ calls",
    ),
    Row(
        r"do_not_grow_with_the_size_of_tensors\[(?!adamw)",
        "kernels/foreach/pieces.py PIECE_BYTES, layerwise.py BATCH, came.py PIECE_ELEMS",
        "pieces are of the size of a CPU's cache on every device",
        r"AssertionError: \d+ calls",
    ),
    # ---- the command line ----
    Row(r"doctor_says", "cli/doctor.py", "it steps on the CPU, and says nothing of the accelerator", "no row of npu"),
]


def row_of(test: str) -> Row | None:
    """Return the row of a test, or None if it passes."""
    return next((row for row in BROKEN if re.search(row.tests, test)), None)
