"""Threads of the cpu backend. Most tests run in processes with a time limit, since a failure may be a hang."""

from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import library
from tests.backends import test_backends, test_came_cpu
from tests.support import training_digests
from tests.support.buckets import bucket, same, stepped
from tests.support.case_tensors import Leaf
from tests.support.cases import CASES, Case
from tests.support.processes import LIMIT, outcomes

ROOT = Path(__file__).parents[2]
STATUS = kernels.status()["cpu"]
pytestmark = pytest.mark.skipif(not STATUS.available, reason=f"backend cpu: {STATUS.detail}")


CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "BIGHORN_"))}


def run(code: str, **environment: str) -> str:
    """Run code in a new process and return its standard output; fail if the code fails or takes too long."""
    teams = "from bighorn._kernels.cpu import library\nlibrary._forked = False\n"  # its parent has no team
    (process,) = outcomes(teams + textwrap.dedent(code), [[]], {**CLEAN, **environment})
    assert process.code == 0, process.errors[-3000:]
    return process.output


def run_afresh(code: str, **environment: str) -> str:
    """Run code like `run`, in a new Python, for variables that torch reads when it is loaded."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**CLEAN, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "free": {},
    "thread-limit-1": {"OMP_THREAD_LIMIT": "1"},
    "thread-limit-2": {"OMP_THREAD_LIMIT": "2"},
    "dynamic": {"OMP_DYNAMIC": "true"},
}
LONG = {"thread-limit-1", "dynamic"}


@pytest.fixture(scope="module")
def digests_of_one_thread() -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGHORN_NUM_THREADS", "1")
        return training_digests.digests(1, training_digests.WITH_CAME)


@pytest.mark.parametrize("environment", [pytest.param(e, marks=[pytest.mark.slow] * (e in LONG)) for e in ENVIRONMENTS])
def test_any_number_of_threads_gives_the_same_bits(environment: str, digests_of_one_thread: list[int]) -> None:
    """The runtime may start fewer threads than requested; only code inside the parallel region can detect it."""
    threads = 5 if environment == "free" else 8
    code = f"""
        import os
        from tests.support import training_digests
        found = training_digests.digests({threads}, training_digests.WITH_CAME)
        print(len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 5, *found)
    """
    tasks, *found = map(int, (run if environment == "free" else run_afresh)(code, **ENVIRONMENTS[environment]).split())
    assert found == digests_of_one_thread
    assert len(set(found)) == 11, "the options made no difference, so neither would a mistake"
    if environment == "free":
        assert tasks >= 5, "5 threads were asked for, but there are no 5"


def test_the_team_is_torchs_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(1)
    assert "1 thread" in kernels.status()["cpu"].detail
    torch.set_num_threads(2)
    assert cores == 1 or "2 threads" in kernels.status()["cpu"].detail
    monkeypatch.setenv("BIGHORN_NUM_THREADS", "5")
    assert "5 threads" in kernels.status()["cpu"].detail


@pytest.mark.parametrize("sizes", {(16,) * 200: [], (32_767,): [], (32_768,): [8, 8], (30_000, 30_000): [8, 8]}.items())
@pytest.mark.parametrize("optimizer", [Lamb, Came, Lars])
@pytest.mark.parametrize("gnu", [True, False], ids=["gnu", "llvm"])
def test_little_work_stays_with_the_caller(
    optimizer: type[Lamb | Came | Lars],
    sizes: tuple[tuple[int, ...], list[int]],
    gnu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for other threads takes longer than the work: milliseconds on a busy machine.

    The test simulates the OpenMP runtimes of GNU, and of LLVM, which torch uses on Windows.
    """
    teams = []

    def parallel(body: Callable[[int], None], data: int, threads: int, _: int) -> None:
        teams.append(threads)
        body(data)

    def push(location: int, thread: int, threads: int) -> None:
        assert (location != 0, thread) == (True, 7)
        teams.append(threads)

    def fork(location: int, arguments: int, task: Callable[[None, None, int], None], data: int) -> None:
        assert (location != 0, arguments) == (True, 1)
        task(None, None, data)

    pointer, body = ctypes.c_void_p, ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    functions: dict[str, Any] = {
        "thread_num": ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0),
        "num_threads": ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1),
    }
    if gnu:
        functions["parallel"] = ctypes.CFUNCTYPE(None, body, pointer, ctypes.c_uint, ctypes.c_uint)(parallel)
    else:
        task = ctypes.CFUNCTYPE(None, pointer, pointer, pointer)
        functions["fork_call"] = ctypes.CFUNCTYPE(None, pointer, ctypes.c_int, task, pointer)(fork)
        functions["push_num_threads"] = ctypes.CFUNCTYPE(None, pointer, ctypes.c_int, ctypes.c_int)(push)
        functions["global_thread_num"] = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(lambda _: 7)
    addresses = {field: ctypes.cast(function, pointer).value for field, function in functions.items()}
    monkeypatch.setattr(library, "OPENMP", addresses)
    monkeypatch.setattr(library, "_run_on", library._run_on.__wrapped__)
    monkeypatch.setenv("BIGHORN_NUM_THREADS", "8")
    parameters = [Parameter(torch.ones(size)) for size in sizes[0]]
    stepped = optimizer(parameters, lr=0.1, max_grad_norm=1.0, backend="cpu")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    assert teams == sizes[1], "for the norm, and for the step"


@pytest.mark.parametrize("name", ["BIGHORN_NUM_THREADS", "BIGHORN_ISA"])
@pytest.mark.parametrize("value", ["0", "-2", "many", "v9", "1025"])
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
def test_a_bad_environment_variable_is_named(
    name: str, value: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parameter changes, neither the float32 one of the C library nor the float64 one of foreach."""
    parameters = [Parameter(torch.ones(64, 64, dtype=dtype)) for dtype in (torch.float64, torch.float32)]
    optimizer = Lamb(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if not first:
        optimizer.step()
    before = copy.deepcopy((parameters, [dict(optimizer.state[p]) for p in parameters if p in optimizer.state]))
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        optimizer.step()
    assert all(a.equal(b) for a, b in zip(parameters, before[0], strict=True))
    for parameter, state in zip(parameters, before[1], strict=first is False):
        assert all(optimizer.state[parameter][key].equal(old) for key, old in state.items())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_between_steps() -> None:
    """The child has no OpenMP workers; both processes continue with the same result."""
    code = """
        import os
        from tests.support import training_digests
        params = training_digests.parameters(largest=1_100_000)
        optimizer = training_digests.train(params)
        training_digests.set_gradients(params, 7)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for _ in range(2):
                    optimizer.step()
                os.write(write, str(training_digests.digest(params, optimizer)).encode())
            finally:
                os._exit(0)
        os.close(write)
        theirs = int(os.read(read, 1000))
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(2):
            optimizer.step()
        assert training_digests.digest(params, optimizer) == theirs, theirs
    """
    run(code, BIGHORN_NUM_THREADS="5")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_another_thread_steps() -> None:
    """The child once could never step: it had the locks of a thread that it does not have."""
    code = """
        import os, threading, warnings
        import torch
        from bighorn import Lamb
        torch.set_num_threads(1)  # a child has no OpenMP workers, for which torch's own kernels wait
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of a fork beside threads
        for backend in ("cpu", "foreach", "reference"):
            param = torch.nn.Parameter(torch.ones(8, 8))
            optimizer = Lamb([param], lr=0.1, backend=backend)
            param.grad = torch.ones(8, 8)
            optimizer.step()
            begun, ended = threading.Event(), threading.Event()
            def wait(_):
                begun.set()
                ended.wait()
            thread = threading.Thread(target=optimizer.step_in_parts, args=([[param]], wait))
            thread.start()
            begun.wait()
            (stepper,) = optimizer._steps.plans._plans.values()
            if backend == "cpu":
                stepper[0].kernels[0].kernel.lock.acquire()  # as inside of the library
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    optimizer.step()
                    code = int(optimizer.state[param]["step"] != 2)
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0, backend
            if backend == "cpu":
                stepper[0].kernels[0].kernel.lock.release()
            ended.set()
            thread.join()
            optimizer.step()
            assert optimizer.state[param]["step"] == 3
    """
    run(code, BIGHORN_NUM_THREADS="1")


def test_four_python_threads_at_once() -> None:
    code = """
        import threading
        from tests.support import training_digests

        def work(index, results):
            params = training_digests.parameters(seed=index, largest=1_100_000)
            results[index] = training_digests.digest(params, training_digests.train(params, steps=3))

        alone, together = {}, {}
        for index in range(4):
            work(index, alone)
        threads = [threading.Thread(target=work, args=(index, together)) for index in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert alone == together and len(set(alone.values())) == 4
    """
    run(code, BIGHORN_NUM_THREADS="3")


@pytest.mark.parametrize("algorithm", ["lamb", "came"])
def test_addresses_of_other_gradients_are_not_used(algorithm: str) -> None:
    """Another thread can bind its gradients after this one has listed gradients and before it lists addresses."""
    results = []
    for other in (False, True):
        of = bucket(algorithm, (70, 90), (3, 17))
        if other:
            others = [torch.zeros_like(grad) for grad in of.grads]
            of.grad_addresses = others, [grad.data_ptr() for grad in others]
        results.append(stepped(kernels.kernel("cpu", algorithm), of))
    assert same(*results)


def test_two_threads_step_one_optimizer_while_their_number_changes() -> None:
    """Results are undefined; CAME's workspace was once allocated for another number of threads."""
    code = """
        import os, threading, torch
        from bighorn import Came, Lamb

        def work(optimizer, numbers):
            for step in range(30):
                os.environ["BIGHORN_NUM_THREADS"] = str(numbers[step % 2])
                try:
                    optimizer.step()
                except RuntimeError as error:
                    assert "two threads" in str(error), error

        params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(60)]
        params.append(torch.nn.Parameter(torch.randn(1200, 1000)))
        for p in params:
            p.grad = torch.randn_like(p)
        for kind in (Came, Lamb, Came):
            optimizer = kind(params, lr=0.01, backend="cpu")
            os.environ["BIGHORN_NUM_THREADS"] = "1"
            optimizer.step()
            threads = [threading.Thread(target=work, args=(optimizer, numbers)) for numbers in ((1, 8), (3, 16))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print("done")
    """
    assert run(code).split() == ["done"]


@pytest.mark.parametrize("size", [1 << 16, pytest.param(1 << 17, marks=[pytest.mark.slow])])
def test_threads_with_small_stacks(size: int) -> None:
    """CAME once used 140 KB of a thread's stack."""
    code = f"""
        import itertools, threading, torch
        from bighorn import Came, Lamb

        def work():
            shapes = ((64, 64), (5000, 40), (30, 9000), (20,), (64, 3, 3, 3), (70, 8, 3, 3))
            dtypes = itertools.product((torch.float32, torch.bfloat16), (None, "int8"))
            for kind, (dtype, bits), shape in itertools.product((Came, Lamb), dtypes, shapes):
                p = torch.nn.Parameter(torch.ones(shape).to(dtype))
                optimizer = kind([p], lr=0.1, state_dtype=bits, backend="cpu")
                for _ in range(2):
                    p.grad = torch.ones_like(p)
                    optimizer.step()
            print("done")

        torch.set_num_threads(1)
        param = torch.nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        Lamb([param]).step()  # imports what would be compiled in the thread, for which Python itself needs more stack
        threading.stack_size({size})
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    assert run(code).split() == ["done"]


def test_denormals_are_flushed_in_workers_as_in_the_caller() -> None:
    """CAME's eps of 1e-30, and a thousandth of it, are normal float32 numbers, and stay."""
    code = """
        import torch
        from torch.nn import Parameter
        from bighorn import Came, Lamb

        def stepped(kind, shapes, gradient, **options):
            params = [Parameter(torch.ones(shape)) for shape in shapes]
            optimizer = kind(params, lr=0.1, weight_decay=0.1, backend="cpu", **options)
            for p in params:
                p.grad = torch.full_like(p, gradient)
            optimizer.step()
            return params, optimizer

        for flush in (False, True, False):
            torch.set_flush_denormal(flush)
            gradient = 2e-38  # a normal number, but a tenth of it is none
            params, optimizer = stepped(Lamb, (3_000_000, *[20_000] * 40), gradient)
            torch.set_flush_denormal(False)
            assert all(((optimizer.state[p]["exp_avg"] != 0) != flush).all() for p in params), flush

        torch.set_flush_denormal(True)
        params, optimizer = stepped(Came, ((1500, 1000), (300, 20), (5, 7)), 0.0, factor="last_two")
        for p in params:
            for name in ("exp_avg_sq_row", "exp_avg_sq_col"):
                tensor = optimizer.state[p][name]
                torch.testing.assert_close(tensor, torch.full_like(tensor, 1e-33), rtol=1e-6, atol=0)
            assert p.eq(torch.tensor(1 - 0.1 * 0.1)).all()
    """
    run(code, BIGHORN_NUM_THREADS="5")


@pytest.mark.parametrize("way", ["torch.set_default_device('meta')", "torch.device('meta').__enter__()"])
def test_another_default_device_changes_nothing(way: str) -> None:
    """The default device is `meta` in place of "cuda"; a tensor created without a device would be on it."""
    code = f"""
        import copy, torch
        from tests.support import training_digests
        from torch.nn import Parameter
        from bighorn import Lamb

        def gradients(params):
            for p in params:
                p.grad = torch.ones_like(p)

        def train(params, backend):
            gradients(params)
            options = dict(lr=0.1, weight_decay=0.1, max_grad_norm=1.0, skip_nonfinite=True, backend=backend)
            groups = [dict(params=params[:1]), dict(params=params[1:], stacked=True, grad_centralization=True)]
            optimizer = Lamb(groups, **options)
            optimizer.telemetry(), optimizer.explain()
            optimizer.step()
            other = Lamb(groups, **options)
            state = copy.deepcopy(optimizer.state_dict())
            for each in state["state"].values():
                each["step"] = 1
            other.load_state_dict(state)
            other.step()
            assert other.telemetry().skipped == 0
            return training_digests.digest(params, other)

        def make():
            return [Parameter(torch.linspace(0, 1, n).view(-1, 5)) for n in (300_000, 60)]

        backends = ("auto", "foreach", "reference")
        starts = [make() for _ in backends]
        expected = list(map(train, (make() for _ in backends), backends))
        {way}
        assert list(map(train, starts, backends)) == expected
    """
    run(code)


LOOPS = {
    *("paper-v5", "paper-v3", "adamw", "adam-l2", "everything", "l2", "adagrad-in-lr", "decoupled", "clip-skip"),
    *("lars-paper", "lars-everything", "lars-large-paper", "lars-bfloat16-paper", "lars-stacked-joint-clipped"),
    *("maximize-l2", "centralised", "stacked-centralised", "large-paper-v5", "mixed-adamw"),
    *(case.id for case in CASES if case.id.endswith(("-paper-v5", "-published")) and case.runs_on("cpu")),
}

# Equal squares: all sums in few lanes of float32 round in the same direction.
ONE_SIZE = Case(
    "one-size",
    {"weight_norm_bounds": (0.8, 1.5)},
    (Leaf("plain.weight", (1, 1025), fill="small"),),
    ({"stacked": True, "decay_mode": "decoupled"},),
)


@pytest.mark.parametrize("level", ["v2", "v3", "v4"])
def test_every_instruction_set_equals_the_reference(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if f"x86-64-{level}" in STATUS.detail:
        pytest.skip(f"x86-64-{level} is what this machine runs anyway: test_backends.py")
    monkeypatch.setenv("BIGHORN_ISA", level)
    if f"x86-64-{level}" not in kernels.status()["cpu"].detail:
        pytest.skip(f"this machine has no x86-64-{level}")
    for case in (*(case for case in CASES if case.id in LOOPS), ONE_SIZE, *test_came_cpu.IN_EACH_SET):
        test_backends.check_steps("cpu", case)
