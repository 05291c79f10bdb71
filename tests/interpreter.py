"""Triton's interpreter, mended for tests (3.7.1): run with TRITON_INTERPRET=1, kernels work on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend() -> None:
    """Round float32 to bfloat16 as devices do, and do not look for what is patched already, which takes a while."""
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(builder: Any, source: Any, dtype: Any) -> Any:
        wanted, given = dtype.scalar, source.dtype.scalar
        if (given, wanted) == (tl.float32, tl.bfloat16):  # the interpreter cuts the mantissa off
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(bits, wanted)
        if (given, wanted) == (tl.bfloat16, tl.float32):  # and it loses numbers below the normal ones
            bits = np.ascontiguousarray(source.data).astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), wanted)
        return cast(builder, source, dtype)

    interpreter.InterpreterBuilder.cast_impl = cast_impl

    patched: set[str] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        # A launch patches what its kernel's module sees; functions of Triton's own that it calls see another module.
        module = function.fn.__module__
        if module.startswith("triton.") and module not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(module)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
