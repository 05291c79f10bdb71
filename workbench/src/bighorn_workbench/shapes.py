"""Parameter shapes of well-known models, in the order in which the models hold them, from their architecture."""

from collections.abc import Callable, Iterable, Iterator

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """ResNet-50, as in torchvision and timm."""
    yield from convolution(64, 3, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(width, channels, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, channels, 1)
            channels = 4 * width
    yield from linear(1000, channels)


def efficientnet_b0() -> Iterator[Shape]:
    """EfficientNet-B0, as in timm."""
    yield from convolution(32, 3, 3)
    channels = 32
    stages = ((3, 16, 1), (3, 24, 2), (5, 40, 2), (3, 80, 3), (5, 112, 3), (5, 192, 4), (3, 320, 1))
    for kernel, out, blocks in stages:
        for _ in range(blocks):
            expanded = channels if out == 16 else 6 * channels
            yield from inverted_bottleneck(kernel, channels, expanded, out, squeezed=channels // 4)
            channels = out
    yield from convolution(1280, channels, 1)
    yield from linear(1000, 1280)


def vit_small() -> Iterator[Shape]:
    """ViT-S/16 at 224 pixels, as in timm (vit_small_patch16_224)."""
    width = 384
    yield from ((1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,))
    for _ in range(12):
        yield from norm(width)
        yield from linear(3 * width, width)
        yield from linear(width, width)
        yield from norm(width)
        yield from linear(4 * width, width)
        yield from linear(width, 4 * width)
    yield from norm(width)
    yield from linear(1000, width)


def bert(layers: int, width: int) -> Iterator[Shape]:
    """BERT without a task's head, as transformers' BertModel."""
    yield from ((30522, width), (512, width), (2, width))
    yield from norm(width)
    for _ in range(layers):
        for _ in range(4):
            yield from linear(width, width)
        yield from norm(width)
        yield from linear(4 * width, width)
        yield from linear(width, 4 * width)
        yield from norm(width)
    yield from linear(width, width)


def llama(layers: int, width: int, hidden: int, heads: int, key_heads: int, vocabulary: int) -> Iterator[Shape]:
    """A decoder as transformers' LlamaForCausalLM: untied head, no biases, one scale for each norm.

    Args:
        layers: The number of blocks.
        width: The width of the residual stream.
        hidden: The hidden width of the gated multilayer perceptron.
        heads: The number of query heads.
        key_heads: The number of key and value heads, which is at most ``heads``.
        vocabulary: The number of tokens.
    """
    keys = width // heads * key_heads
    yield (vocabulary, width)
    for _ in range(layers):
        yield from ((width, width), (keys, width), (keys, width), (width, width))
        yield from ((hidden, width), (hidden, width), (width, hidden))
        yield from norm(width)  # two norms, each with a scale only
    yield from ((width,), (vocabulary, width))


def norm(width: int) -> Iterator[Shape]:
    """A normalisation's scale and shift."""
    yield from ((width,), (width,))


def linear(out: int, channels: int) -> Iterator[Shape]:
    """A linear layer with its bias."""
    yield from ((out, channels), (out,))


def convolution(out: int, channels: int, kernel: int) -> Iterator[Shape]:
    """Yield a convolution and its normalisation; ``channels`` is the number of channels of one group."""
    yield (out, channels, kernel, kernel)
    yield from norm(out)


def inverted_bottleneck(kernel: int, channels: int, expanded: int, out: int, squeezed: int) -> Iterator[Shape]:
    """Yield expansion if there is any, depthwise convolution, squeeze and excitation, and projection."""
    if expanded != channels:
        yield from convolution(expanded, channels, 1)
    yield from convolution(expanded, 1, kernel)
    yield from ((squeezed, expanded, 1, 1), (squeezed,), (expanded, squeezed, 1, 1), (expanded,))
    yield from convolution(out, expanded, 1)


SHAPES: dict[str, Callable[[], Iterable[Shape]]] = {
    "tiny": lambda: [(8, 8)] * 200,
    "efficientnet_b0": efficientnet_b0,
    "vit_small": vit_small,
    "resnet50": resnet50,
    "bert_base": lambda: bert(12, 768),
    "bert_large": lambda: bert(24, 1024),
    "llama_1b": lambda: llama(22, 2048, 5632, heads=32, key_heads=4, vocabulary=32000),
    "llama_7b": lambda: llama(32, 4096, 11008, heads=32, key_heads=32, vocabulary=32000),
    "one": lambda: [(30522, 1024)],
    "linears": lambda: [(1024, 1024)] * 100,
}
"""The sets of shapes by name: `tiny` shows the overhead of a step, `one` is a tensor larger than any cache, `linears`
is LAMBrrr's model, `llama_1b` TinyLlama, `llama_7b` Llama 2."""
