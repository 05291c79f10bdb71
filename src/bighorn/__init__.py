"""Bighorn: fused LAMB, CAME and LARS for PyTorch. Sharded runs match a single process up to rounding."""

from bighorn import groups, schedules, telemetry
from bighorn._backend_status import BackendStatus, Status, status
from bighorn._distributed import FlatLayout, Fragment, TailOverlap, megatron_groups, release_gradients, shard_update
from bighorn._optim.came import Came, CameTelemetry
from bighorn._optim.checkpointing import ConvertedStateWarning
from bighorn._optim.lamb import Lamb, LambTelemetry
from bighorn._optim.lars import Lars, LarsTelemetry
from bighorn._optim.presets import CAME_PRESETS, LARS_PRESETS, PRESETS, Preset
from bighorn._scaling import ExponentialScale, FixedScale, LossScaler, WindowScale
from bighorn.offloading import offload

__all__ = [
    "CAME_PRESETS",
    "LARS_PRESETS",
    "PRESETS",
    "BackendStatus",
    "Came",
    "CameTelemetry",
    "ConvertedStateWarning",
    "ExponentialScale",
    "FixedScale",
    "FlatLayout",
    "Fragment",
    "Lamb",
    "LambTelemetry",
    "Lars",
    "LarsTelemetry",
    "LossScaler",
    "Preset",
    "Status",
    "TailOverlap",
    "WindowScale",
    "__version__",
    "groups",
    "megatron_groups",
    "offload",
    "release_gradients",
    "schedules",
    "shard_update",
    "status",
    "telemetry",
]

__version__ = "0.1.0"
