"""The bytes of state of other packages' optimizers for each parameter, counted from their code as of a version."""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

Named = Sequence[tuple[str, Tensor]]
"""Parameters with their names, possibly on the meta device."""

STEP_BYTES = 4
"""The bytes of a step count, which is a float32 if that is the default dtype."""
GALORE_RANK = 128
"""The rank of the projection, which is the default of Hugging Face's Trainer."""


def adam(params: Named) -> dict[str, int]:
    """torch.optim.Adam and AdamW: exp_avg and exp_avg_sq like the parameter, step."""
    return {name: 2 * param.nbytes + STEP_BYTES for name, param in params}


def sgd(params: Named) -> dict[str, int]:
    """torch.optim.SGD with momentum: momentum_buffer like the parameter."""
    return {name: param.nbytes for name, param in params}


def adafactor(params: Named) -> dict[str, int]:
    """torch.optim.Adafactor: row_var and col_var of the last two dims, variance of less than two, step."""
    return {name: _averages(param.shape) * param.element_size() + STEP_BYTES for name, param in params}


def _averages(shape: Sequence[int]) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    *leading, rows, columns = shape
    return math.prod(leading) * (rows + columns)


def lion(params: Named) -> dict[str, int]:
    """lion-pytorch 0.2.5: exp_avg like the parameter."""
    return {name: param.nbytes for name, param in params}


def bitsandbytes_8bit(params: Named) -> dict[str, int]:
    """AdamW8bit of bitsandbytes 0.50.2: two codes of 8 bits, two float32 for each 256; 4,096 elements or more."""
    return {
        name: 2 * (param.numel() + 4 * -(-param.numel() // 256)) if param.numel() >= 4096 else 8 * param.numel()
        for name, param in params
    }


def torchao_4bit(params: Named) -> dict[str, int]:
    """AdamW4bit of torchao 0.18.0: two codes of 4 bits with a table, two float32 for each 128; whole blocks alone."""

    def moment(param: Tensor) -> int:
        count = param.numel()
        return count // 2 + 4 * (count // 128) + 4 * 16 if count >= 4096 and count % 128 == 0 else param.nbytes

    return {name: 2 * moment(param) + STEP_BYTES for name, param in params}


def flashoptim(params: Named) -> dict[str, int]:
    """FlashAdamW of flashoptim 0.1.4: two codes of 8 bits, two float16 for each 32; a third byte of a weight, step."""

    def held(param: Tensor) -> int:
        codes, scales = 2 * param.numel(), 4 * -(-param.numel() // 32)
        return codes + scales + (param.numel() if param.element_size() == 2 else 0) + 2 * STEP_BYTES

    return {name: held(param) for name, param in params}


def galore(params: Named) -> dict[str, int]:
    """AdamW of galore-torch 1.0 on all matrices: both moments of the projected gradient, and the projection."""

    def elements(param: Tensor) -> int:
        if param.ndim != 2:
            return 2 * param.numel()
        less, more = sorted(param.shape)
        return min(GALORE_RANK, less) * (2 * more + less)

    return {name: elements(param) * param.element_size() for name, param in params}


OF_TORCH: Mapping[str, Callable[[Named], dict[str, int]]] = {"adamw": adam, "sgd": sgd, "adafactor": adafactor}
"""The optimizers of torch, by the names of ``bighorn train`` and ``bighorn compare``; Adam has the state of AdamW."""
OF_OTHERS: Mapping[str, Callable[[Named], dict[str, int]]] = {
    "lion": lion,
    "bitsandbytes-int8": bitsandbytes_8bit,
    "torchao-int4": torchao_4bit,
    "flashoptim": flashoptim,
    "galore": galore,
}
"""Those of other packages, which Bighorn does not run."""

RELEASING = ("flashoptim",)
"""Those that can step inside backward, when a gradient is complete."""
