"""Tasks and models out of a user's files: how they are imported, and how an error in them is reported."""

import importlib.util
import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bighorn_workbench.errors import InputError
from bighorn_workbench.metrics import seems_lower
from bighorn_workbench.ranks import Aborted
from bighorn_workbench.tasks import defaults, length
from bighorn_workbench.values import suggestion

METHODS = ("model", "batches", "loss", "evaluate")
HIDDEN_PATHS = (str(Path(__file__).parents[1]), "<frozen importlib", str(Path(importlib.util.__file__).parent))


NO_DEFAULT = object()


class UserError(InputError):
    """An error in the user's code; the message has its traceback, without our frames."""


def imported(flag: str, place: str, forms: str) -> Any:
    """Return what ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME`` names; modules are also looked for in the current folder.

    Raises:
        InputError: It cannot be imported.
    """
    source, colon, attribute = place.rpartition(":")
    is_file = source.endswith(".py")
    words = [*attribute.split("."), *([] if is_file else source.split("."))]
    if not colon or not all(word.isidentifier() for word in words):
        raise InputError(f"{flag} {place!r} is not of the form {forms} like mypackage.nets:small.")
    if is_file and not Path(source).is_file():
        raise InputError(f"{flag} {place}: there is no file {source} in {Path.cwd()}.")
    found = user_call(f"{flag} {place}", partial(_module_of_file if is_file else _module, source))
    for word in attribute.split("."):
        inner = member(f"{flag} {place}", found, word)
        if inner is NO_DEFAULT:
            public = [name for name in dir(found) if not name.startswith("_")]
            raise InputError(f"{flag} {place}: no {word!r} there; {suggestion(word, public)}")
        found = inner
    return found


def _module(name: str) -> Any:
    _search(Path.cwd())  # as in `python -m`
    return import_module(name)


def _module_of_file(name: str) -> Any:
    path = Path(name).resolve()
    _search(path.parent)  # as in `python FILE.py`, for the modules beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # the workers of a DataLoader find its classes by name
    spec.loader.exec_module(module)
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def user_call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function; an error in it becomes a :class:`UserError` that names the function and its arguments.

    So does ``sys.exit()``, which would end the command as if it had succeeded. Only Ctrl-C passes through.
    """
    try:
        return function(*arguments)
    except InputError:
        raise
    except BaseException as error:  # the code of users may raise any error
        if isinstance(error, KeyboardInterrupt) and _is_ctrl_c(error):
            raise
        given = f" was called with ({', '.join(map(shown, arguments))}), and" if arguments else ""
        raise UserError(f"{what}{given} failed:\n{user_traceback(error)}") from error


def _is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether an error may be a Ctrl-C: without Python's own handler, only ours or the user's code raises it."""
    return isinstance(error, Aborted) or signal.getsignal(signal.SIGINT) is signal.default_int_handler


def member(what: str, of: Any, name: str, default: Any = NO_DEFAULT) -> Any:
    """Return an attribute of a user's object, or a default if there is none; a property that fails is an error."""

    def get() -> Any:
        try:
            return getattr(of, name)
        except AttributeError:
            if inspect.getattr_static(of, name, NO_DEFAULT) is NO_DEFAULT:
                return default
            raise

    return user_call(f"{what}: {name}", get)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error, from the first frame that is not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(HIDDEN_PATHS):
        del frames[0]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*head, *traceback.format_exception_only(error)]).rstrip()


def shown(value: object) -> str:
    """Return an argument in short: tensors by dtype and shape.

    Example:
        >>> shown((torch.ones(2, 3), {"ids": torch.arange(4)}, "train"))
        "(float32[2, 3], {'ids': int64[4]}, 'train')"
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(shown, value[:8])) + ", ..." * (len(value) > 8)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    try:
        return f"{value!r:.200}" if isinstance(value, str | int | float | None) else type(value).__name__
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return type(value).__name__


class UserTask:
    """A task of a user, whose errors name the method and its arguments.

    Args:
        task: An object with the members of :class:`bighorn_workbench.tasks.Task`.
        place: Its name in messages.

    Attributes:
        inner: The object.

    Raises:
        InputError: A member is missing.
    """

    def __init__(self, task: Any, place: str) -> None:
        what = f"--task {place}"
        missing = [f"{name}()" for name in METHODS if not callable(member(what, task, name, None))]
        if not isinstance(member(what, task, "metric", None), str):
            missing.append('the attribute metric, such as metric = "accuracy"')
        if missing:
            has = "the module" if isinstance(task, ModuleType) else type(task).__name__
            raise InputError(f"--task {place}: {has} lacks {', '.join(missing)}. See bighorn_workbench.tasks.Task.")
        self.inner, self.place = task, place
        try:
            self.description = str(defaults(self).description)
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"--task {place}: {error}. See bighorn_workbench.tasks.Defaults.") from error
        if seems_lower(str(self.metric)) and not hasattr(self, "higher_is_better"):
            raise InputError(
                f"--task {place}: is a lower {self.metric} better? Give the task the attribute higher_is_better = "
                "False, or True."
            )
        text = inspect.getdoc(task) if type(task).__module__ != "builtins" else ""
        text = (text or type(task).__name__).partition("\n")[0].rstrip(".")
        self.description = self.description or text

    def __copy__(self) -> "UserTask":
        """Copy the task for one run, so that its attributes have no effect on the next; a module is shared."""
        inner = self.inner if isinstance(self.inner, ModuleType) else user_call(f"{self.place}: copy", copy, self.inner)
        return UserTask(inner, self.place)

    def source(self) -> list[str]:
        """Return the text of the task's file, class and methods, as far as it can be read: a notebook has no file."""
        file = self.place.rpartition(":")[0]
        name = Path(file).stem if file.endswith(".py") else file or type(self.inner).__module__
        module: Any = None if name == "__main__" else sys.modules.get(name)
        methods, found = [getattr(self.inner, each, None) for each in (*METHODS, "held_out", "excluded")], []
        for each in (module, type(self.inner), *methods):
            with suppress(OSError, TypeError):
                found.append(inspect.getsource(each))
        return found

    def __getattr__(self, name: str) -> Any:
        value = member(self.place, self.inner, name)  # an optional attribute or method
        if value is NO_DEFAULT:
            raise AttributeError(name)
        return partial(self._call, name) if callable(value) else value

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> Iterable[Any]:
        """Call the user's method, and report errors of the iteration, too."""
        return UserBatches(self, split, batch_size, generator)

    def evaluate(self, model: nn.Module, split: str) -> Mapping[str, float]:
        """Call the user's method, and check what it returns."""
        before = _state_of(model)
        found: Any = self._call("evaluate", model, split)
        asked = f"{self.place}: evaluate(model, {split!r})"
        changed = [name for name, state in _state_of(model).items() if before.get(name) != state]
        if changed:
            raise InputError(
                f"{asked} changes {changed[0]}, so that the next step would train other weights. Evaluate a copy of "
                "the model, or put its weights back, in the same parameters."
            )
        if not isinstance(found, Mapping) or self.metric not in found:
            raise InputError(
                f"{asked} returned {shown(found)}, but must return a dict with the metric that decides, "
                f"{{{self.metric!r}: ...}}."
            )
        try:
            return {str(name): float(value) for name, value in found.items()}
        except Exception as error:  # a value may be of any kind, and an integer beyond every float
            raise InputError(f"{asked} returned {shown(found)}, but every value must be one number.") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        return user_call(f"{self.place}: {name}", getattr(self.inner, name), *arguments)


def _state_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return for each parameter which object it is, and the sum of its bits."""
    return {name: (id(parameter), _bits(parameter)) for name, parameter in model.named_parameters()}


def _bits(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(dense.itemsize, torch.int64)
    return int(dense.contiguous().reshape(-1).view(kind).sum(dtype=torch.int64))


class UserBatches:
    """The batches of a user's task, whose errors name the task."""

    def __init__(self, task: UserTask, split: str, batch_size: int, generator: torch.Generator) -> None:
        self._name = f"{task.place}: batches({split!r}, {batch_size}, generator)"
        self._made: Any = task._call("batches", split, batch_size, generator)
        if not isinstance(self._made, Iterable):
            raise InputError(
                f"{self._name} returned {shown(self._made)}, which is not iterable. Return a DataLoader, a list or a "
                "generator."
            )

    def __len__(self) -> int:
        found = user_call(f"{self._name}: len()", partial(length, self._made))
        if found is None:
            raise TypeError(f"{self._name} has no len()")  # as everywhere
        return int(found)

    def __iter__(self) -> Iterator[Any]:
        iterator = user_call(self._name, iter, self._made)
        end = object()
        while (batch := user_call(f"iterating {self._name}", lambda: next(iterator, end))) is not end:
            yield batch
