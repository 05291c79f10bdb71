"""Where tensors lie: asked at every step, of each parameter, each gradient and each tensor of the state.

`Tensor.data_ptr` takes 0.06 us a tensor, and 0.2 with cold caches. The C library asks for all of a list in 0.01 each,
through functions of Python's stable interface and the one that torch hands to the code that it generates
(torch/_inductor/codecache.py). That is no public name, so there is a way without it, as there is without the library;
all of this may go when torch tells many addresses at once.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from array import array
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from bighorn.kernels.cpu.library import LIBRARY, address


class Objects(ctypes.Structure):
    """`Objects` of csrc/addresses.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("item", "next", "address")]


class Known(ctypes.Structure):
    """`Known` of csrc/addresses.c."""

    _fields_ = [("tensors", ctypes.c_void_p), ("addresses", ctypes.c_void_p), ("count", ctypes.c_int64)]


def objects() -> Objects:
    """Functions of Python, and torch's that tells a tensor's address, if it is there."""
    tells: int | None = None
    with suppress(ImportError):
        from torch._C._dynamo import guards

        tells = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    pythons = ctypes.pythonapi.PyList_GetItem, ctypes.pythonapi.PyDict_Next
    return Objects(*(ctypes.cast(function, ctypes.c_void_p) for function in pythons), tells)


def load() -> ctypes.PyDLL | None:
    """The library, called with the interpreter's lock; None if it is not there, or torch's function is not."""
    if LIBRARY is None or OBJECTS.address is None:
        return None
    library, a_list, count = ctypes.PyDLL(LIBRARY._name), ctypes.py_object, ctypes.c_int64
    library.bighorn_addresses.argtypes = [ctypes.POINTER(Objects), a_list, count, ctypes.c_void_p]
    library.bighorn_addresses.restype = None
    library.bighorn_without_address.argtypes = [ctypes.POINTER(Objects), a_list, count]
    library.bighorn_without_address.restype = count
    library.bighorn_unmoved.argtypes = [ctypes.POINTER(Objects), ctypes.POINTER(Known), a_list, count, a_list, count]
    return library


OBJECTS = objects()
FAST = load()


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are at its address.

    A wrapper subclass (torchao's float8 weights, torch's TwoTensor) holds other tensors, and a storage can be freed
    with `resize_(0)`: both have the address 0. One of functorch's has none.
    """
    return tensor.numel() == 0 or tensor.device.type == "meta" or bool(_address(tensor))


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's storage was freed, so that torch's own kernels would read address 0."""
    return type(tensor) in (Tensor, Parameter) and not has_memory(tensor) and _address(tensor) == 0


def _address(tensor: Tensor) -> int | None:
    if type(tensor) in (Tensor, Parameter):
        with suppress(RuntimeError):  # of functorch's
            return tensor.data_ptr()
        return None
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FakeTensor warns that it has no address, and gives 0
        return tensor.data_ptr()
    return None


def without_address(tensors: list[Tensor]) -> int:
    """How many tensors have the address 0: those without elements, and those for which `has_memory` is False.

    It is called at every step, for tensors alike those that a plan was made of.
    """
    if FAST is None:
        return _one_by_one(tensors).count(0)
    return int(FAST.bighorn_without_address(OBJECTS, tensors, len(tensors)))


def check_memory(tensors: list[Tensor]) -> None:
    """Ask for addresses in a way that can fail.

    Raises:
        RuntimeError: A tensor has no memory of its own, as one of functorch's.
    """
    _one_by_one(tensors)


def addresses(tensors: list[Tensor]) -> array[int]:
    """Where tensors lie, of which `check_memory` has seen these or others alike (`optim/fingerprint.py`).

    An error in here would end the process, since there is C between torch and Python.
    """
    if FAST is None:
        return array("Q", _one_by_one(tensors))
    found = array("Q", bytes(8 * len(tensors)))
    FAST.bighorn_addresses(OBJECTS, tensors, len(tensors), address(found))
    return found


class Whereabouts:
    """Which tensors there were in a list and among the values of dicts, and where they lay."""

    def __init__(self, tensors: list[Tensor], dicts: list[dict[str, Any]]) -> None:
        self._objects = _flat(tensors, dicts)  # alive, so that no others can lie there instead
        self._addresses = _one_by_one(self._objects)
        self._all_tensors = len(self._addresses) == len(self._objects)
        self._arrays = array("Q", map(id, self._objects)), array("Q", self._addresses)  # alive for `_known`
        self._known = Known(*map(address, self._arrays), len(self._objects))

    def hold(self, tensors: list[Tensor], dicts: list[dict[str, Any]]) -> bool:
        """Whether tensors lie there still: the same ones or, what takes longer to see, others in their stead."""
        return self._same(tensors, dicts) or self._addresses == _one_by_one(_flat(tensors, dicts))

    def _same(self, tensors: list[Tensor], dicts: list[dict[str, Any]]) -> bool:
        if FAST is None or not self._all_tensors:
            return False
        return bool(FAST.bighorn_unmoved(OBJECTS, self._known, tensors, len(tensors), dicts, len(dicts)))


def _flat(tensors: list[Tensor], dicts: list[dict[str, Any]]) -> list[Any]:
    return [*tensors, *itertools.chain.from_iterable(map(dict.values, dicts))]


def _one_by_one(things: list[Any]) -> list[int]:
    try:
        return list(map(Tensor.data_ptr, things))
    except TypeError:  # something of the user's own lies among the state
        return [thing.data_ptr() for thing in things if isinstance(thing, Tensor)]
