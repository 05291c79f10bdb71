"""Triton: fused kernels on GPUs. Triton is imported when a tensor needs it, and bighorn works without it."""

from bighorn.kernels.triton import device, trial

device.trial_step = trial.lamb_step
