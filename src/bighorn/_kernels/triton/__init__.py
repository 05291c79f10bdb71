"""Triton: fused kernels on GPUs. Triton is imported when a tensor needs it, and bighorn works without it."""

from bighorn._kernels.triton import device, trial
from bighorn._kernels.triton.came import Came
from bighorn._kernels.triton.lamb import Lamb
from bighorn._kernels.triton.lars import Lars

ALGORITHMS = {"lamb": Lamb, "came": Came, "lars": Lars}

device.trial_step = trial.lamb_step
