"""The environment that a result depends on: versions, threads, the machine, and the commit of a checkout."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import bighorn
from bighorn_workbench.errors import InputError


def provenance(command: str, device: str = "cpu") -> dict[str, Any]:
    """Return the provenance of measurements: the command, its date, the commit, the environment and the machine.

    Call it before the runs, since they change the load of the machine, and a commit made meanwhile is not the one that
    ran.
    """
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **commit(),
        "environment": environment(device),
        "machine": machine(),
    }


def environment(device: str = "cpu") -> dict[str, str | int]:
    """Versions, threads and the device of this process."""
    return {
        "bighorn": package_version("bighorn"),
        "torch": str(torch.__version__),
        "numpy": package_version("numpy"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "device": device_name(device),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cpu backend": cpu_backend().detail,
    }


def cpu_backend() -> bighorn.BackendStatus:
    """Return whether the library's backend for CPUs is there, without a step."""
    return bighorn.status(["cpu"], trial=False).backends[0]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return bighorn.status(["cpu"], trial=False).cores


def device_name(device: str) -> str:
    """The model name of a GPU, such as "NVIDIA H100 80GB HBM3", and "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def check_variables() -> None:
    """Raise an error for values of ``BIGHORN_NUM_THREADS`` and ``BIGHORN_ISA`` that the first step would reject."""
    try:
        cpu_backend()
    except ValueError as error:
        raise InputError(f"{error}. Correct the variable, or unset it.") from error


def package_version(name: str) -> str:
    """The installed version of a package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def machine() -> dict[str, str | int | float]:
    """Cores, caches and load, as far as the system reports them."""
    facts: dict[str, str | int | float] = {"processors": os.cpu_count() or 1, "cores allowed": cores()}
    caches = [_cache(folder) for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))]
    if caches:
        facts["caches"] = ", ".join(caches)
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    return facts


def _cache(folder: Path) -> str:
    level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
    return f"L{level}{'' if kind == 'Unified' else kind[0].lower()} {size}"


def commit() -> dict[str, str | bool]:
    """The commit that this package runs from and whether its sources are unchanged; empty outside a checkout."""
    folder = Path(bighorn.__file__).parent
    try:
        # git fails for an untracked package, such as one in a virtual environment within another project.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        return {
            "commit": _git(folder, "rev-parse", "HEAD"),
            "clean": not _git(folder, "status", "--porcelain", ".", ":/workbench/src"),
        }
    except (OSError, subprocess.CalledProcessError):
        return {}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
