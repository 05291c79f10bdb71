"""The bytes of state of other packages' optimizers for each parameter, counted from their code as of a version."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

STEP_BYTES = 4
"""The bytes of a step count, which is a float32 if that is the default dtype."""
GALORE_RANK = 128
"""The rank of the projection, which is the default of Hugging Face's Trainer."""


def adam(param: Tensor) -> int:
    """torch.optim.Adam and AdamW: exp_avg and exp_avg_sq like the parameter, step."""
    return 2 * param.nbytes + STEP_BYTES


def momentum(param: Tensor) -> int:
    """torch.optim.SGD with momentum, and lion-pytorch 0.2.5: momentum_buffer or exp_avg like the parameter."""
    return param.nbytes


def adafactor(param: Tensor) -> int:
    """torch.optim.Adafactor: row_var and col_var of the last two dims, variance of less than two, step."""
    averages = param.numel()
    if param.ndim >= 2:
        *leading, rows, columns = param.shape
        averages = math.prod(leading) * (rows + columns)
    return averages * param.element_size() + STEP_BYTES


def bitsandbytes_8bit(param: Tensor) -> int:
    """AdamW8bit of bitsandbytes 0.50.2: two codes of 8 bits, two float32 for each 256; 4,096 elements or more."""
    count = param.numel()
    return 2 * (count + 4 * -(-count // 256)) if count >= 4096 else 8 * count


def torchao_4bit(param: Tensor) -> int:
    """AdamW4bit of torchao 0.18.0: two codes of 4 bits with a table, two float32 for each 128; whole blocks alone."""
    count = param.numel()
    moment = count // 2 + 4 * (count // 128) + 4 * 16 if count >= 4096 and count % 128 == 0 else param.nbytes
    return 2 * moment + STEP_BYTES


def flashoptim(param: Tensor) -> int:
    """FlashAdamW of flashoptim 0.1.4: two codes of 8 bits, two float16 for each 32; a third byte of a weight, step."""
    codes, scales = 2 * param.numel(), 4 * -(-param.numel() // 32)
    return codes + scales + (param.numel() if param.element_size() == 2 else 0) + 2 * STEP_BYTES


def galore(param: Tensor) -> int:
    """AdamW of galore-torch 1.0 on all matrices: both moments of the projected gradient, and the projection."""
    if param.ndim != 2:
        return 2 * param.nbytes
    less, more = sorted(param.shape)
    return min(GALORE_RANK, less) * (2 * more + less) * param.element_size()


OF_TORCH: Mapping[str, Callable[[Tensor], int]] = {"adamw": adam, "sgd": momentum, "adafactor": adafactor}
"""The optimizers of torch, by the names of ``bighorn train`` and ``bighorn compare``; Adam has the state of AdamW."""
OF_OTHERS: Mapping[str, Callable[[Tensor], int]] = {
    "lion": momentum,
    "bitsandbytes-int8": bitsandbytes_8bit,
    "torchao-int4": torchao_4bit,
    "flashoptim": flashoptim,
    "galore": galore,
}
"""The optimizers of other packages, which Bighorn does not run."""
