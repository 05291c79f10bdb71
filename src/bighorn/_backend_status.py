"""The backends of this machine, each tried by a step, and the versions and settings that results depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

import torch

from bighorn import _kernels as kernels
from bighorn._arguments import choice, flag
from bighorn._capabilities import capabilities
from bighorn._kernels.cpu import library
from bighorn._optim.lamb import Lamb


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend works on a device.

    Attributes:
        name: The backend, as an optimizer's argument `backend` names it.
        device: The device on which it was tried.
        works: Whether the backend exists, and a step gives the right result.
        detail: What it runs on, or the reason why it does not work.
        has: The capabilities of an accelerator, by name; empty for the backends' usual devices.
    """

    name: str
    device: torch.device
    works: bool
    detail: str
    has: Mapping[str, bool] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, and the device if it is not the backend's usual one."""
        return f"{self.name}, {self.device}" if self.has else self.name


@dataclass(frozen=True)
class Status:
    """The result of `bighorn.status`; as a string it is a table.

    Attributes:
        version: The version of Bighorn.
        torch: The version of torch.
        c_library: The path of the C library, or None without one.
        threads: The threads of the next step on the CPU: `BIGHORN_NUM_THREADS`, or torch's number.
        cores: The cores that this process may use, by its affinity and its control group.
        backends: The backends, in the order in which "auto" prefers them, and plain torch on an accelerator.
    """

    version: str
    torch: str
    c_library: str | None
    threads: int
    cores: int
    backends: tuple[BackendStatus, ...]

    def __str__(self) -> str:
        rows = [(row.title, f"{'works' if row.works else 'does not work'}  {row.detail}") for row in self.backends]
        rows += [
            ("bighorn", self.version),
            ("torch", self.torch),
            ("C library", self.c_library or "none"),
            ("threads", f"{self.threads} on {self.cores} cores"),
        ]
        width = 2 + max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}{text}" for name, text in rows)


def status(
    backends: Iterable[str] = kernels.BACKENDS, device: torch.device | str | None = None, *, trial: bool = True
) -> Status:
    """Return which backends work on this machine, and why the others do not.

    `python -m bighorn` prints it.

    Args:
        backends: The backends to look at. Default: ("cpu", "triton", "foreach", "reference").
        device: A device on which plain torch is tried too, such as "npu:0". Default: None, which means torch's
            accelerator, if there is one.
        trial: Whether each backend takes a step, since only a step shows that it works. Default: True.

    Raises:
        RuntimeError: torch does not have the device.
        ValueError: There is no backend of a name, or `BIGHORN_NUM_THREADS` or `BIGHORN_ISA` has a wrong value.

    Example:
        >>> import bighorn
        >>> [(row.name, row.works) for row in bighorn.status(["foreach", "reference"]).backends if not row.has]
        [('foreach', True), ('reference', True)]
    """
    check = choice(*kernels.BACKENDS)
    names = [check("backends", name) for name in backends]
    library.isa()  # wrong values of its variable raise here, also without a library
    return Status(
        version=version("bighorn"),
        torch=str(torch.__version__),
        c_library=library.LIBRARY_DETAIL if library.LIBRARY else None,
        threads=library.threads(),
        cores=library.cores(),
        backends=tuple(_rows(names, device, flag("trial", trial))),
    )


def _rows(names: Iterable[str], device: torch.device | str | None, trial: bool) -> Iterator[BackendStatus]:
    for name, found in kernels.status(names).items():
        place = torch.device(found.device)
        failure = _step_failure(name, place) if trial and found.available else None
        yield BackendStatus(name, place, found.available and not failure, failure or found.detail)
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device is None else device
    if accelerator is not None and "foreach" in names:
        yield _on_accelerator(torch.device(accelerator), trial)


def _on_accelerator(device: torch.device, trial: bool) -> BackendStatus:
    has = asdict(capabilities(device))
    failure = _step_failure("foreach", device) if trial else None
    words = ", ".join(f"{name.replace('_', ' ')}: {'yes' if value else 'no'}" for name, value in has.items())
    range_of_sums = "" if has["float64"] else "; norms are in float32, and right between 1e-19 and 1e19"
    return BackendStatus("foreach", device, not failure, failure or f"{words}{range_of_sums}", has)


def _step_failure(backend: str, device: torch.device) -> str | None:
    """Return the reason why a step of a backend fails, or None."""
    try:
        ours, exact = _step(backend, torch.float32, device), _step("reference", torch.float64, torch.device("cpu"))
    except Exception as error:
        return f"a step fails: {error}"
    if not torch.allclose(ours.double(), exact, rtol=1e-5):
        return "a step gives wrong results; please report it with the output of python -m bighorn"
    return None


def _step(backend: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    param, grad = torch.linspace(1, 2, 1000), torch.linspace(1, -2, 1000)
    param = param.to(device, dtype)
    param.grad = grad.to(device, dtype)
    Lamb([param], lr=0.1, weight_decay=0.01, backend=backend).step()
    return param.cpu()
