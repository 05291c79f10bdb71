"""`python -m tests.csrc.cross [--wheels] [PLATFORM ...]` builds the C library, or wheels, for other platforms.

It runs steps of the library where a runner is installed, and compares the results with x86-64 Linux. It needs the
packages cmake, wheel and ziglang, whose compiler builds for all platforms, and the programs in `RUNNERS`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.csrc.compare import differences

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "cross"

SYSTEMS = {"linux": "Linux", "windows": "Windows", "macos": "Darwin"}
TAGS = {
    "x86_64-linux-musl": "musllinux_1_2_x86_64",
    "aarch64-linux-gnu.2.17": "manylinux_2_17_aarch64",
    "aarch64-linux-musl": "musllinux_1_2_aarch64",
    "x86_64-windows-gnu": "win_amd64",
    "aarch64-macos": "macosx_11_0_arm64",
}

LEVELS = {"x86_64": ("2", "3"), "aarch64": ("0",)}
"""The instruction sets to run; the other tests run level 4 of x86-64 on a machine that supports it."""

WINE = shutil.which("wine64", path=f"{os.environ['PATH']}{os.pathsep}/usr/lib/wine")
QEMU = shutil.which("qemu-aarch64-static")
GLIBC = Path("/usr/aarch64-linux-gnu")
RUNNERS: dict[str, list[str | None]] = {
    "x86_64-linux-musl": [],
    "aarch64-linux-gnu.2.17": [QEMU, "-L", str(GLIBC) if GLIBC.is_dir() else None],
    "aarch64-linux-musl": [QEMU],
    "x86_64-windows-gnu": [WINE],
    "aarch64-macos": [None],
}
"""The platforms, each with the command that runs its programs, or None if that is not installed."""

RUNTIME = Path(sys.prefix) / "windows/Library/bin/libiomp5md.dll"
"""The OpenMP runtime that torch uses on Windows, from the package intel-openmp."""


def options_of(platform: str) -> list[str]:
    """Return the definitions with which CMake builds for a platform."""
    processor, system = platform.split("-")[:2]
    options = {
        "CMAKE_C_COMPILER": str(HERE / "zig_cc"),
        "CMAKE_SYSTEM_NAME": SYSTEMS[system],
        "CMAKE_SYSTEM_PROCESSOR": processor,
        "CMAKE_EXE_LINKER_FLAGS": "-static" if platform.endswith("musl") else "",
        "BIGHORN_WERROR": "ON",
    }
    return [f"{name}={value}" for name, value in options.items()]


def run(command: Sequence[str | Path], **variables: str) -> str:
    """Run a command that must succeed, with environment variables, and return its output."""
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def built(platform: str) -> Path:
    """Build the library and the program `steps` for a platform, and return the program."""
    cmake, folder = Path(sys.executable).with_name("cmake"), FOLDER / platform
    defined = [f"-D{option}" for option in options_of(platform)]
    run([cmake, "--fresh", "-S", ROOT, "-B", folder, "-DBIGHORN_STEPS=ON", *defined], TARGET=platform)
    run([cmake, "--build", folder, "--parallel", str(os.cpu_count())], TARGET=platform)
    return folder / ("steps.exe" if "windows" in platform else "steps")


def wheel(platform: str) -> Path:
    """Build a wheel with the library for a platform, and return it in the folder `dist`."""
    folder = FOLDER / "wheels" / platform
    shutil.rmtree(folder, ignore_errors=True)
    settings = [f"--config-settings=cmake.define.{option}" for option in options_of(platform)]
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *settings, ROOT],
        TARGET=platform,
    )
    (native,) = folder.glob("*.whl")
    libraries = [name for name in zipfile.ZipFile(native).namelist() if Path(name).name.startswith("libbighorn.")]
    if libraries != [f"bighorn/_kernels/libbighorn.{'dll' if 'windows' in platform else 'so'}"]:
        sys.exit(f"{platform}: the wheel has the libraries {libraries}")
    tags: list[str | Path] = [
        sys.executable,
        "-m",
        "wheel",
        "tags",
        "--remove",
        "--platform-tag",
        TAGS[platform],
        native,
    ]
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.copy(folder / run(tags).strip(), ROOT / "dist"))


def differing(program: Path, runner: list[str], level: str) -> list[str]:
    """Return the names of the results that differ from x86-64 Linux, or between teams of threads."""
    runtimes = [[], [RUNTIME]] if program.suffix == ".exe" else [[]]
    # Wine 8 lacks a function with which the runtime locates processors.
    variables = {"WINEDEBUG": "-all", "WINEPREFIX": str(FOLDER / "wine"), "KMP_AFFINITY": "disabled"}
    found = [run([*runner, program, level, *runtime], **variables) for runtime in runtimes]
    names = differences((HERE / "steps.expected").read_text(), found[0])
    return names if found[0] == found[-1] else [*names, f"on the threads of {RUNTIME.name}"]


def main() -> int:
    """Print one line for each platform and instruction set; the exit status is 1 if results differ."""
    arguments, status = sys.argv[1:], 0
    platforms = [name for name in arguments if name != "--wheels"] or [*RUNNERS]
    if "--wheels" in arguments:
        for platform in platforms:
            print(wheel(platform).name, flush=True)
        return 0
    for platform in platforms:
        program, runner = built(platform), [part for part in RUNNERS[platform] if part]
        if len(runner) < len(RUNNERS[platform]):
            print(f"{platform}: compiled, not run: nothing here runs its programs")
            continue
        for level in LEVELS[platform.partition("-")[0]]:
            names = differing(program, runner, level)
            print(f"{platform}, level {level}: {', '.join(names) or 'as on x86-64 Linux'}", flush=True)
            status |= bool(names)
    return status


if __name__ == "__main__":
    sys.exit(main())
