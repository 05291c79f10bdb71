"""Corrections of Triton's interpreter (3.7.1) for tests: with TRITON_INTERPRET=1, kernels run on the CPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from bighorn._kernels.triton import device, launch_group

compiled = pytest.mark.skipif(device.interpreted(), reason="needs Triton's compiler, and TRITON_INTERPRET is set")
interpreted = pytest.mark.skipif(
    not device.interpreted(), reason="needs TRITON_INTERPRET=1, which test_in_the_interpreter sets for it"
)


def mend() -> None:
    """Round float32 to bfloat16 as devices do, and cache objects that the interpreter makes for every operation.

    An operation makes a dozen of them, which depend only on the type and shape of its operands.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    # Each sum and product of integers is else computed again in int64, and not looked at: asserts need `debug`.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(builder: Any, source: Any, dtype: Any) -> Any:
        wanted, given = dtype.scalar, source.dtype.scalar
        if (given, wanted) == (tl.float32, tl.bfloat16):  # the interpreter truncates the mantissa
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(bits, wanted)
        if (given, wanted) == (tl.bfloat16, tl.float32):  # the interpreter loses subnormal numbers
            bits = np.ascontiguousarray(source.data).astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), wanted)
        return cast(builder, source, dtype)

    interpreter.InterpreterBuilder.cast_impl = cast_impl

    patched: set[str] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        # A launch patches names in the kernel's module; the functions of Triton that it calls are in other modules.
        module = function.fn.__module__
        if module.startswith("triton.") and module not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(module)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    np_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = np_dtype(dtype)
        return numpy_dtypes[name]

    interpreter._get_np_dtype = get_np_dtype

    make_type, types = tl.block_type.__init__, {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        vars(self).update(types[key])

    tl.block_type.__init__ = init_type

    shapes: dict[Any, tuple[Any, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as the original
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    tl.tensor.__init__ = init_tensor

    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value

    def patch_attr(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def only_the_first_and_the_last(part: launch_group.LaunchGroup[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make launches of more than two programs run only the first and the last program of a launch group."""
    from triton.runtime.interpreter import interpreter_builder as builder

    programs = len(part.program_to_slot)
    part.launches = {key: (launch, min(n, 2), tables) for key, (launch, n, tables) in part.launches.items()}
    place, size = builder.set_grid_idx, builder.set_grid_dim
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(programs - 1 if x == 1 else x, y, z))
    monkeypatch.setattr(builder, "set_grid_dim", lambda x, y, z: size(programs if x == 2 else x, y, z))
