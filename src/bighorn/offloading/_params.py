"""Parameters and groups that exist twice: the model's, and those in the host's memory that the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from bighorn._distributed import sharding
from bighorn._distributed.step_in_parts import BighornOptimizer
from bighorn._kernels.rounding import LOW
from bighorn.offloading._copies import Copies

SLAB_BYTES = 256 << 20
"""The most bytes of a slab, unless one tensor needs more; torch rounds page-locked memory up to a power of two."""

MASTER = "master"
"""The name of a float32 master in a `state_dict`, which Bighorn's own `weight_rounding="master"` gives it, too."""

LOADED = "loaded_master"
"""Its name while a `state_dict` is loaded: Bighorn drops a master that its `weight_rounding` does not ask for."""

ALIGNMENT = 64
"""The bytes to which tensors in a slab are aligned: a cache line."""


@dataclass(eq=False)
class OffloadedParam:
    """A parameter of the model, and the one in the host's memory that the optimizer steps."""

    device: Tensor
    host: Tensor
    weights: Tensor
    """This rank's shard of the weights, in the memory that the device copies from and to; `host` itself, or rounded."""
    master: Tensor | None
    """This rank's shard of `host` in float32, if `weights` are its rounding."""
    grad: Tensor
    """The gradient in the host's memory, of this rank's shard."""
    grad_of_host: Tensor
    """`grad`, with the type and layout of a gradient of `host`."""
    origin: torch.device
    """The device that the parameter was offloaded from."""
    grad_dtype: torch.dtype
    """The dtype of gradients on the device."""
    label: str
    distributed: bool
    """Whether this rank may hold a shard only."""
    equal_at: tuple[int, ...] = ()
    """The address and version counters of `device` at the time when it and `host` were equal; none if they are not."""

    @property
    def shard(self) -> Tensor:
        """This rank's shard on the device, without its version counter."""
        return self._local(self.device).data

    @property
    def written(self) -> bool:
        """Whether a program has written the weights on the device since the last step."""
        return self._address_and_versions() != self.equal_at

    def round_master(self) -> None:
        """Round the master, which has taken a step, to the weights."""
        if self.master is not None:
            self.weights.copy_(self.master)

    def take_weights(self) -> None:
        """Take over weights that have come from the device; those that are the rounding of their master keep it."""
        if self.master is not None:
            rounded = self.master.to(self.weights.dtype)
            self.master.copy_(torch.where(rounded == self.weights, self.master, self.weights))

    def note_equal(self) -> None:
        """Note that the weights on the device and on the host are equal."""
        self.equal_at = self._address_and_versions()

    def _address_and_versions(self) -> tuple[int, ...]:
        # A write to a distributed tensor is not counted by its shard, nor the other way round. `param.data = other` is
        # not counted at all.
        shard = self._local(self.device)
        return shard.data_ptr(), shard._version, self.device._version

    def _local(self, tensor: Tensor) -> Tensor:
        return sharding.local(tensor) if self.distributed else tensor

    def checked_grad(self) -> Tensor:
        """Return this rank's shard of the gradient on the device; raise if it does not fit, or the model has moved."""
        shard = self._local(self.device)
        if (shard.device, shard.dtype, shard.shape) != (self.origin, self.weights.dtype, self.weights.shape):
            raise RuntimeError(
                f"{self.label} was offloaded from {self.origin} as {self.weights.dtype} of shape "
                f"{tuple(self.weights.shape)}, and is on {shard.device}, {shard.dtype} of shape {tuple(shard.shape)} "
                "now: move and convert the model first, then make the optimizer and offload it"
            )

        grad = self.device.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise RuntimeError(f"the gradient of {self.label} is sparse: make its layer with sparse=False")
        if self.distributed:
            grad = sharding.local(sharding.aligned(grad, self.device))
        if grad.dtype != self.grad_dtype:
            raise RuntimeError(
                f"the gradient of {self.label} is {grad.dtype}, where memory was taken for {self.grad_dtype}: set its "
                "grad_dtype before offload()"
            )
        return grad

    def on_host(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the parameter in the host's memory."""
        return {
            name: sharding.on_host(sharding.local(value).cpu(), value) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }


def offloaded_params(
    model: nn.Module, optimizer: Optimizer, copies: Copies, *, masters: bool
) -> list[list[OffloadedParam]]:
    """Return the parameters of each group, with memory on the host.

    Args:
        model: The model, for names.
        optimizer: The optimizer.
        copies: The copies, which have the memory.
        masters: Whether 16-bit weights have masters in float32.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    shards = [sharding.local(param.detach()) for param in params]
    dtypes = [getattr(param, "grad_dtype", None) or param.dtype for param in params]
    weights = slots(shards, [param.dtype for param in params], copies)
    # Optimizers of torch want gradients of their parameter's dtype, and so do parameters before torch 2.10.
    wide = masters and not (isinstance(optimizer, BighornOptimizer) and hasattr(Tensor, "grad_dtype"))
    grads = slots(shards, [torch.promote_types(dtype, torch.float32) if wide else dtype for dtype in dtypes], copies)
    names = {id(param): name for name, param in model.named_parameters()}
    labels = [names.get(id(param), f"parameter {number} of the optimizer") for number, param in enumerate(params)]
    made = iter(list(map(_offloaded, params, weights, grads, dtypes, labels, [masters] * len(params))))
    return [[next(made) for _ in group["params"]] for group in optimizer.param_groups]


def _offloaded(
    param: Tensor, weights: Tensor, grad: Tensor, grad_dtype: torch.dtype, label: str, masters: bool
) -> OffloadedParam:
    master = None
    if masters and weights.dtype in LOW:
        master = torch.full_like(weights, torch.nan, dtype=torch.float32)  # the rounding of no weight
    host = sharding.on_host(weights if master is None else master, param)
    host = Parameter(host, requires_grad=param.requires_grad) if isinstance(param, Parameter) else host
    if grad.dtype != host.dtype:
        host.grad_dtype = None
    origin, grad_of_host = sharding.local(param).device, sharding.on_host(grad, param)
    distributed = sharding.any_distributed([param])
    return OffloadedParam(param, host, weights, master, grad, grad_of_host, origin, grad_dtype, label, distributed)


def slots(likes: Sequence[Tensor], dtypes: Sequence[torch.dtype], copies: Copies) -> list[Tensor]:
    """Return a tensor of the host's memory for each tensor, in a few slabs, with the strides of its elements."""
    sizes = [padded(like.numel() * dtype.itemsize) for like, dtype in zip(likes, dtypes, strict=True)]
    slabs: list[list[int]] = []
    for size in sizes:
        if not slabs or sum(slabs[-1]) + size > SLAB_BYTES:
            slabs.append([])
        slabs[-1].append(size)
    memory = [part for slab in slabs for part in torch.split(copies.pinned(sum(slab)), slab)]
    return [strided(part, like, dtype) for part, like, dtype in zip(memory, likes, dtypes, strict=True)]


def padded(nbytes: int) -> int:
    """Return a size with the bytes up to the next aligned tensor."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def strided(memory: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the beginning of some bytes as a tensor with the shape and the order of elements of another."""
    values = memory[: like.numel() * dtype.itemsize].view(dtype)
    return values.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def with_masters(optimizer: Optimizer, params: Sequence[OffloadedParam]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with the masters of the parameters that have state."""
    masters = {param.host for param in params if param.master is not None}
    hosts = [host for group in optimizer.param_groups for host in group["params"]]
    state_dict = optimizer.state_dict()
    state = {
        number: {**each, MASTER: hosts[number].detach()} if hosts[number] in masters else each
        for number, each in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@torch.no_grad()
def load_with_masters(optimizer: Optimizer, state_dict: dict[str, Any], params: Sequence[OffloadedParam]) -> None:
    """Load a `state_dict` into an optimizer, and the masters in it into the host's parameters.

    If it has no masters, they start as the weights that are loaded into the model.
    """
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    if all(param.master is None for param in params) or not isinstance(states, dict):
        optimizer.load_state_dict(state_dict)
        return
    # The optimizer may load by name, so that a master comes with its parameter's state, under a name that it keeps.
    state = {
        number: {LOADED if name == MASTER else name: value for name, value in each.items()}
        if isinstance(each, dict)
        else each
        for number, each in states.items()
    }
    optimizer.load_state_dict({**state_dict, "state": state})
    for param in params:
        master = optimizer.state[param.host].pop(LOADED, None) if param.host in optimizer.state else None
        if master is not None and param.master is not None:
            sharding.local(param.host).copy_(sharding.local(master))


class SharedOptions:
    """Options kept equal in two lists of groups: programs write into the first, the optimizer reads the second.

    Args:
        groups: The groups with the model's parameters.
        optimizer: The optimizer, whose groups have the host's.
    """

    def __init__(self, groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
        self._groups, self._optimizer = groups, optimizer
        self._seen = [dict(group) for group in groups]

    def exchange(self) -> None:
        """Give the optimizer the options that a program has written, and show those that the optimizer has changed.

        A tensor is always given, since a program may write into it; the program's value counts.
        """
        for outer, inner, seen in zip(self._groups, self._optimizer.param_groups, self._seen, strict=True):
            for name in seen.keys() - outer.keys():
                inner.pop(name, None)
            for name, value in outer.items():
                if name != "params" and (isinstance(value, Tensor) or name not in seen or value is not seen[name]):
                    inner[name] = value.cpu() if isinstance(value, Tensor) else value
        self._show()

    def read(self) -> None:
        """Show the optimizer's options, after a checkpoint was loaded."""
        for outer, inner in zip(self._groups, self._optimizer.param_groups, strict=True):
            for name in [name for name, value in outer.items() if name not in inner or isinstance(value, Tensor)]:
                del outer[name]
        self._show()

    def _show(self) -> None:
        for outer, inner in zip(self._groups, self._optimizer.param_groups, strict=True):
            kept = {name for name, value in outer.items() if isinstance(value, Tensor)} | {"params"}
            outer.update({name: value for name, value in inner.items() if name not in kept})
        self._seen = [dict(group) for group in self._groups]
