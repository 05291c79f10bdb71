"""The shapes of models' parameters, for tests of the library alone."""

from __future__ import annotations

Shape = tuple[int, ...]


def bert(layers: int, width: int) -> list[Shape]:
    """BERT without pooler and head, 12 or 24 layers."""
    norm: list[Shape] = [(width,)] * 2
    attention: list[Shape] = [(width, width), (width,)] * 4
    hidden: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(30522, width), (512, width), (2, width), *norm, *[*attention, *norm, *hidden, *norm] * layers]


MODELS: dict[str, list[Shape]] = {
    "encoder": bert(24, 1024),
    "decoder": [(128_256, 2048), *[(2048, 2048), (512, 2048), (8192, 2048), (8192, 2048), (2048, 8192), (2048,)] * 16],
    "convolutions": [
        (64, 3, 7, 7),
        *[(64, 64, 3, 3), (256, 64, 1, 1), (512, 512, 3, 3), (2048, 512, 1, 1), (512,)] * 8,
    ],
    "small": [(384, 3, 16, 16), *[(1152, 384), (1152,), (384, 384), (1536, 384), (384, 1536)] * 12, (1000, 384)],
    "one": [(8192, 8192)],
}
"""The matrices of models of 20 million to a billion parameters, roughly."""
