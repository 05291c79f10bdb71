"""Planted faults, one of each family, and the tests that find them."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A replacement in a file of a package."""

    family: str
    file: str
    """Relative to the folder with the packages."""
    right: str
    """Text that the file has once."""
    wrong: str
    tests: str
    """The arguments of pytest; a test that fails must be among them."""


FAULTS = (
    Fault(
        "a sign of the mathematics",
        "bighorn/kernels/reference/lamb.py",
        "u = r + o.weight_decay * x if",
        "u = r - o.weight_decay * x if",
        "tests/math/test_lamb_scalar.py",
    ),
    Fault(
        "a step that is counted from 1",
        "bighorn/kernels/reference/came.py",
        "1 - t**-o.decay_rate",
        "1 - (t + 1) ** -o.decay_rate",
        "tests/math/test_came_reference.py",
    ),
    Fault(
        "a bound",
        "bighorn/kernels/reference/came.py",
        "(rms_u / o.clip_threshold).clamp(min=1)",
        "(rms_u / o.clip_threshold).clamp(min=0.5)",
        "tests/math/test_came_reference.py",
    ),
    Fault(
        "a special case",
        "bighorn/kernels/reference/lamb.py",
        "(weight_norm == 0) | (update_norm == 0)",
        "(weight_norm == 0) & (update_norm == 0)",
        "tests/math/test_lamb_scalar.py",
    ),
    Fault(
        "the dtype of a sum",
        "bighorn/square_sums.py",
        "x.to(torch.float64).square().sum()",
        "x.square().sum().to(torch.float64)",
        "tests/backends/test_backends.py -k reference",
    ),
    Fault(
        "an axis in foreach",
        "bighorn/kernels/foreach/came.py",
        "1 / shape[axis]]",
        "1 / shape[axis + 1]]",
        "tests/backends/test_came_foreach.py",
    ),
    Fault(
        "a write after an overflow",
        "bighorn/kernels/arithmetic.py",
        "    if apply_mask is not None:  # a list",
        "    if apply_mask is None:  # a list",
        "tests/backends/test_backends.py -k foreach",
    ),
    Fault(
        "elements in another order",
        "bighorn/kernels/csrc/lamb_loops.c",
        "stored[i] = u1, stored[half + i] = u2;",
        "stored[i] = u2, stored[half + i] = u1;",
        "tests/backends/test_backends.py -k cpu",
    ),
    Fault(
        "a block of codes across rows",
        "bighorn/optim/state.py",
        "rows = dims[:-1] if matrices else first",
        "rows = first",
        "tests/contract/test_checkpoints.py tests/backends/test_backends.py -k 'rows or last-two'",
    ),
    Fault(
        "a conversion of blocks",
        "bighorn/optim/state.py",
        "if old is new and scales.dim() ==",
        "if old is new or scales.dim() ==",
        "tests/contract/test_checkpoints.py tests/precision/test_precision.py",
    ),
    Fault(
        "the scale of another block",
        "bighorn/kernels/csrc/codec.h",
        "at < inner ? at : 0, part.scale + 1, end",
        "at < inner ? at : 0, part.scale + (at < inner), end",
        "tests/backends/test_backends.py -k cpu",
    ),
    Fault(
        "the rest of odd sizes",
        "bighorn/kernels/csrc/lamb_loops.c",
        "    if (n % 2) apply_loop(",
        "    if (n % 4 == 1) apply_loop(",
        "tests/backends/test_backends.py -k cpu",
    ),
    Fault(
        "a barrier",
        "bighorn/kernels/csrc/run.c",
        "    if (team == 1) return;",
        "    if (team >= 1) return;",
        "tests/backends/test_c_library.py -k barrier",
    ),
    Fault(
        "a stride",
        "bighorn/kernels/cpu/tensors.py",
        "    if order == strides:",
        "    if sorted(order) == sorted(strides):",
        "tests/contract/test_storage.py tests/contract/test_step.py",
    ),
    Fault(
        "an offset of a shard",
        "bighorn/kernels/cpu/tensors.py",
        "    return bucket.row_offsets[i] + sum(offset * stride for offset, stride in along)",
        "    return bucket.row_offsets[i] + 0 * sum(offset * stride for offset, stride in along)",
        "tests/distributed/test_sharding.py",
    ),
    Fault(
        "random bits that repeat",
        "bighorn/kernels/rounding.py",
        "at_step = _mix((key + t.to(torch.int64)) & WORD)",
        "at_step = _mix((key + 0 * t.to(torch.int64)) & WORD)",
        "tests/precision",
    ),
    Fault(
        "a sum that is lost in Triton",
        "bighorn/kernels/triton/came_kernels.py",
        "clip = 1 / tl.where(excess < 1, 1.0, excess)",
        "clip = 1 / tl.where(excess < 2, 1.0, excess)",
        "tests/backends/test_interpreter.py",
    ),
    Fault(
        "a column of a table",
        "bighorn/kernels/triton/lamb_layout.py",
        'CORRECTS_LR=lambda o: o.bias_correction == "lr"',
        "CORRECTS_LR=lambda o: o.bias_correction",
        "tests/backends/test_interpreter.py",
    ),
    Fault(
        "a guard of addresses",
        "bighorn/optim/plan_cache.py",
        "            and self._addresses == inputs.addresses\n",
        "",
        "tests/contract/test_guard_addresses.py",
    ),
    Fault(
        "a guard of kinds",
        "bighorn/optim/plan_cache.py",
        "            and self._params_alike(inputs.params)\n",
        "",
        "tests/contract/test_guard_kinds.py tests/contract/test_storage.py",
    ),
    Fault(
        "a slice of the memory before",
        "bighorn/optim/step_plan.py",
        "same = view is binding.view and not binding.stacked",
        "same = view is binding.view",
        "tests/contract/test_guard_addresses.py tests/contract/test_storage.py tests/contract/test_step.py",
    ),
    Fault(
        "the strides of a buffer",
        "bighorn/optim/centring.py",
        "self.shard.box(self.to).contiguous().sum",
        "self.shard.box(self.to).sum",
        "tests/contract/test_transposed_matrices.py",
    ),
    Fault(
        "state that is not restored",
        "bighorn/optim/checkpointing.py",
        "steps = max(steps, float(states[param]",
        "steps = min(steps, float(states[param]",
        "tests/contract/test_checkpoints.py tests/contract/test_foreign_checkpoints.py",
    ),
    Fault(
        "the first rule of several",
        "bighorn/groups.py",
        "index = next((i for i, rule in enumerate(rules)",
        "index = next((i for i, rule in reversed(list(enumerate(rules)))",
        "tests/contract/test_group_rules.py",
    ),
    Fault(
        "a count that is not cleared",
        "bighorn/scaling/policies.py",
        "torch.where(changes, zero, good), torch.where(changes, zero, bad)",
        "torch.where(changes, zero, good), torch.where(shrinks, zero, bad)",
        "tests/scaling",
    ),
    Fault(
        "a mean that is a sum",
        "bighorn/distributed/overlap.py",
        "buffer.div_(self._world)",
        "buffer.div_(1)",
        "tests/distributed/test_overlap.py",
    ),
    Fault(
        "an error on one rank alone",
        "bighorn/optim/agreement.py",
        "ranks.check_same([*whole, *_described(mine, groups, names)])",
        "ranks.check_same(whole)",
        "tests/distributed/test_agreement.py",
    ),
    Fault(
        "a rank that counts twice",
        "bighorn/distributed/sharding.py",
        "sums = torch.cat([(part if self._counts(dims) else torch.zeros_like(part)).view(-1)",
        "sums = torch.cat([part.view(-1)",
        "tests/distributed/test_sharding.py",
    ),
    Fault(
        "gradients that changed in flight",
        "bighorn/distributed/overlap.py",
        "if replaced or self.buffer._version != self.version:",
        "if replaced:",
        "tests/distributed/test_overlap.py",
    ),
    Fault(
        "a NaN that a clip hides",
        "bighorn/offloading/step.py",
        'torch.clamp(self.setup.max_grad_norm / (numbers["norm"] + 1e-6), max=1.0)',
        'torch.clamp(self.setup.max_grad_norm / (numbers["norm"] + 1e-6), max=1.0).nan_to_num(1.0)',
        "tests/offload",
    ),
    Fault(
        "a dropped error of a thread",
        "bighorn/offloading/worker.py",
        "            self._error = error\n",
        "            pass\n",
        "tests/offload/test_worker.py tests/offload/test_faults.py",
    ),
    Fault(
        "the end of a schedule",
        "bighorn/schedules/decay.py",
        "done = min(step, self.decay_steps) / self.decay_steps",
        "done = min(step, self.decay_steps - 1) / self.decay_steps",
        "tests/math/test_schedules.py",
    ),
    Fault(
        "a generator that a resumed run has not",
        "bighorn_workbench/run.py",
        "restore_generators(generators[self.ranks.rank], self.device)",
        "restore_generators(generator_state(self.device), self.device)",
        "workbench/tests/test_resume.py",
    ),
    Fault(
        "a file that is half written",
        "bighorn_workbench/files.py",
        "        temporary.unlink(missing_ok=True)\n        raise\n",
        "        raise\n",
        "workbench/tests/test_files.py",
    ),
)
