"""Triton: fused kernels on GPUs. Triton is imported when a tensor needs it, and bighorn works without it."""

from bighorn.kernels.triton import device, trial
from bighorn.kernels.triton.came import Came
from bighorn.kernels.triton.lamb import Lamb
from bighorn.kernels.triton.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}

device.trial_step = trial.lamb_step
