"""The weights for a prediction: of a set of shapes, a task or any code. No memory is allocated for them."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from bighorn_workbench.builtin_tasks import PLACES, model_of
from bighorn_workbench.builtin_tasks.user import imported, user_call
from bighorn_workbench.errors import InputError
from bighorn_workbench.footprint import Weights
from bighorn_workbench.shapes import SHAPES

MOST_TENSORS = 500_000
"""The parameters of a model of a configuration; the largest mixtures of experts have 70,000."""

PARTS = re.compile(r"num_labels|\w*(layers?|blocks|depths?|stages|experts)")
"""The names of numbers in a configuration that are of parts, each made in a loop; other sizes allocate nothing."""


def of_shapes(name: str, dtype: torch.dtype) -> Weights:
    """Return the weights of a set of shapes. They have no names, so they are numbered."""
    shapes = enumerate(SHAPES[name]())
    return Weights([(str(index), torch.empty(shape, dtype=dtype, device="meta")) for index, shape in shapes])


def of_task(name: str, data: str | None, dtype: torch.dtype) -> Weights:
    """Return the weights of a task's model; the data determine the number of classes."""
    with torch.device("meta"):
        return _checked("--task", name, model_of(name, data), dtype)


def of_code(flag: str, place: str, dtype: torch.dtype) -> Weights:
    """Return the weights of the result of ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``, called without arguments.

    Raises:
        InputError: It cannot be imported or called, or returns no model with trainable parameters of known shapes.
    """
    found = imported(flag, place, PLACES)
    with torch.device("meta"):
        made = user_call(f"{flag} {place}", found)
    return _checked(flag, place, made, dtype)


def of_hf_config(flag: str, path: str, dtype: torch.dtype) -> Weights:
    """Return the weights of the model that a Hugging Face configuration file describes.

    The file names classes, kernels and weights of a backbone: classes of transformers' own models are made, and no
    other code is run, nor anything downloaded.

    Raises:
        InputError: transformers is not installed, or does not know such a model.
    """
    if not Path(path).is_file():
        raise InputError(f"{flag} {path}: there is no such file. Give the config.json beside a model's weights.")
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model loads its backbone's weights and kernels when it is made
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise InputError(f"{flag} {path} needs the package transformers: pip install transformers") from error
    try:
        _check_parts(json.loads(Path(path).read_text()))
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = "eager"
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        models = [kind for kind in named if isinstance(kind, type) and issubclass(kind, nn.Module)]
        make = models[0] if models else partial(transformers.AutoModel.from_config, trust_remote_code=False)
        with torch.device("meta"), _at_most(MOST_TENSORS):
            made = make(config)
    except Exception as error:  # a configuration may be wrong in any way
        raise InputError(f"{flag} {path}: {type(error).__name__}: {error}") from error
    return _checked(flag, path, made, dtype)


def _check_parts(found: object, name: str = "") -> None:
    """Raise an error for a number of parts whose making might not end, anywhere in a configuration."""
    if isinstance(found, Mapping):
        for key, each in found.items():
            _check_parts(each, key)
    elif isinstance(found, list):
        for each in found:
            _check_parts(each, name)
    elif isinstance(found, int | float) and found > MOST_TENSORS and PARTS.fullmatch(name):
        raise ValueError(f"it has {name}={found:,}, more than {MOST_TENSORS:,}. Correct it")


@contextmanager
def _at_most(count: int) -> Iterator[None]:
    """Raise an error for a model of more parameters, whose making might not end."""
    made = 0

    def counted(*_: object) -> None:
        nonlocal made
        made += 1
        if made > count:
            raise ValueError(f"it has more than {count:,} parameters' tensors. Correct its number of layers")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _checked(flag: str, place: str, made: object, dtype: torch.dtype) -> Weights:
    """Return the weights of what user code or a file has made."""
    if not isinstance(made, nn.Module):
        raise InputError(f"{flag} {place} gives a {type(made).__name__}, but must give a torch.nn.Module.")
    for name, param in made.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise InputError(f"{flag} {place}: {name} has no shape before the first batch. Give it its sizes.")
    params = list(made.named_parameters())
    trainable = [
        (name, torch.empty_like(param, dtype=dtype, device="meta")) for name, param in params if param.requires_grad
    ]
    if not trainable:
        raise InputError(f"{flag} {place} has no trainable parameters.")
    return Weights(trainable, sum(dtype.itemsize * param.numel() for _, param in params if not param.requires_grad))
