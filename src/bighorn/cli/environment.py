"""What a result depends on beyond the command: versions, machine, threads."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bighorn import kernels


def environment() -> dict[str, str | int]:
    """Describe this process, in words and numbers."""
    return {
        "bighorn": package_version("bighorn"),
        "torch": str(torch.__version__),
        "numpy": package_version("numpy"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cpu backend": kernels.status()["cpu"].detail,
    }


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
