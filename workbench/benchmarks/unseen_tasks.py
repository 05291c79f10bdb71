"""Twelve small tasks, each after a published example, on which answers of the workbench are tested.

    bighorn compare --task workbench/benchmarks/unseen_tasks.py:Poisson --optimizers adamw,lamb,came --budget 3min

The data come with scikit-learn, or are made here from a seed. A run takes about half a second of one core.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, one_hot


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator for data."""
    return torch.Generator().manual_seed(seed)


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


class Samples:
    """Samples of tensors: three fifths for training, one each for validation and test."""

    metric, higher_is_better, one_thread = "rmse", False, True
    batch_size, epochs = 32, 20.0

    def __init__(self) -> None:
        tensors = self.samples_()
        order = torch.randperm(len(tensors[0]), generator=seeded(1))
        a, b = 3 * len(order) // 5, 4 * len(order) // 5
        parts = {"train": order[:a], "validation": order[a:b], "test": order[b:]}
        self.splits = {name: tuple(tensor[part] for tensor in tensors) for name, part in parts.items()}

    def samples_(self) -> tuple[Tensor, ...]:
        """Return all samples."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return a new model."""
        raise NotImplementedError

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> list[Any]:
        """Return full batches in random order."""
        tensors = self.splits[split]
        order = torch.randperm(len(tensors[0]), generator=generator)
        full = len(order) // batch_size * batch_size if split == "train" else len(order)
        return [tuple(tensor[part] for tensor in tensors) for part in torch.split(order[:full], batch_size)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean squared error."""
        inputs, targets = batch
        return mse_loss(model(inputs).squeeze(-1), targets)

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the loss and its root."""
        loss = float(self.loss(model, self.splits[split]))
        return {"loss": loss, "rmse": math.sqrt(loss)}


class Classes(Samples):
    """Samples with a class each, or one for each of their positions."""

    metric, higher_is_better = "accuracy", True

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross-entropy."""
        inputs, targets = batch
        return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the mean cross-entropy and the accuracy."""
        inputs, targets = self.splits[split]
        logits, classes = model(inputs).flatten(0, -2), targets.flatten()
        right = (logits.argmax(1) == classes).float().mean()
        return {"loss": float(cross_entropy(logits, classes)), "accuracy": float(right)}


class Diabetes(Samples):
    """A table of 442 patients, as in scikit-learn's examples of regression; the target has variance 1."""

    epochs = 40.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return columns and targets."""
        table = sklearn.datasets.load_diabetes()
        inputs, targets = torch.tensor(table.data).float(), torch.tensor(table.target).float()
        return inputs / inputs.std(0), (targets - targets.mean()) / targets.std()

    def model(self) -> nn.Module:
        """Two hidden layers."""
        return mlp(10, 64, 64, 1)


class Friedman(Samples):
    """Friedman's first function of ten variables, as scikit-learn makes it, by a network with batch norms."""

    def samples_(self) -> tuple[Tensor, ...]:
        """Return variables and values."""
        inputs, targets = sklearn.datasets.make_friedman1(1500, noise=0.5, random_state=0)
        return torch.tensor(inputs).float(), torch.tensor(targets).float()

    def model(self) -> nn.Module:
        """Two hidden layers with batch norms."""
        return nn.Sequential(
            *(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU()),
            *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)),
        )


class Textures(Classes):
    """Waves of eight directions and frequencies under noise, by a small ConvMixer (arXiv:2201.09792v1, appendix D)."""

    batch_size, epochs = 32, 4.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return images of 16 x 16 and classes."""
        generator, count = seeded(), 1200
        classes = torch.randint(8, (count,), generator=generator)
        angle, frequency = classes % 4 * math.pi / 4, 0.6 + 0.25 * (classes // 4)
        shift = 2 * math.pi * torch.rand(count, generator=generator)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        at = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
        waves = (frequency[:, None, None] * at + shift[:, None, None]).sin()
        return (waves + 2.0 * torch.randn(waves.shape, generator=generator))[:, None], classes

    def model(self) -> nn.Module:
        """Patches of 2 x 2, two blocks of a depthwise and a pointwise convolution."""

        def block(channels: int) -> nn.Sequential:
            depthwise = nn.Conv2d(channels, channels, 5, groups=channels, padding=2)
            pointwise = nn.Conv2d(channels, channels, 1)
            return nn.Sequential(
                depthwise, nn.GELU(), nn.BatchNorm2d(channels), pointwise, nn.GELU(), nn.BatchNorm2d(channels)
            )

        return nn.Sequential(
            *(nn.Conv2d(1, 24, 2, 2), nn.GELU(), nn.BatchNorm2d(24)),
            *(block(24), block(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 8)),
        )


class Transformer(nn.Module):
    """Pre-norm blocks over embedded tokens or patches, with learned positions."""

    def __init__(self, embed: nn.Module, length: int, out: int, width: int = 32, causal: bool = False) -> None:
        super().__init__()
        self.embed, self.position = embed, nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        for each in self.blocks.layers:  # torch copies the first one; each begins with its own weights
            for parameter in each.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(width, out)
        mask = torch.full((length, length), -math.inf).triu(1) if causal else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits for each position."""
        hidden: Tensor = self.blocks(self.embed(inputs) + self.position, mask=self.mask)
        return self.head(hidden)  # type: ignore[no-any-return]


class PatchMean(nn.Module):
    """A vision transformer with the mean of its patches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Transformer(nn.Linear(16, 32), 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of each image."""
        patches = images.view(-1, 4, 4, 4, 4).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.body(patches).mean(1)  # type: ignore[no-any-return]


class Shapes(Classes):
    """Ten random prototypes of 16 x 16, shifted and under noise, by a small vision transformer as timm's."""

    batch_size, epochs = 32, 8.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return images and classes."""
        generator, count = seeded(), 1200
        prototypes = torch.randn(10, 4, 4, generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
        classes = torch.randint(10, (count,), generator=generator)
        shifts = torch.randint(0, 4, (count, 2), generator=generator).tolist()
        images = torch.stack([prototypes[c].roll(s, (0, 1)) for c, s in zip(classes.tolist(), shifts, strict=True)])
        return images + 0.8 * torch.randn(images.shape, generator=generator), classes

    def model(self) -> nn.Module:
        """Two blocks of 32 channels on 16 patches."""
        return PatchMean()


class Markov(Classes):
    """Texts of a chain of second order over 8 letters, by a small GPT; the metric is its perplexity."""

    metric, higher_is_better = "perplexity", False
    batch_size, epochs = 16, 4.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return windows of 32 letters, and the next letters."""
        generator, letters = seeded(), 8
        chain = (2.0 * torch.randn(letters, letters, letters, generator=generator)).softmax(-1)
        state = torch.randint(letters, (800, 2), generator=generator)
        text = [state[:, 0], state[:, 1]]
        for _ in range(31):
            text.append(torch.multinomial(chain[text[-2], text[-1]], 1, generator=generator)[:, 0])
        whole = torch.stack(text, 1)
        return whole[:, :-1], whole[:, 1:]

    def model(self) -> nn.Module:
        """Two causal blocks of 32 channels."""
        return Transformer(nn.Embedding(8, 32), 32, 8, causal=True)

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the loss and the perplexity."""
        loss = super().evaluate(model, split)["loss"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 50))}


class Sorting(Classes):
    """Sequences of 8 digits to sort, as in minGPT's demo, by a bidirectional encoder."""

    batch_size, epochs = 32, 8.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return digits and sorted digits."""
        digits = torch.randint(10, (1500, 8), generator=seeded())
        return digits, digits.sort(1).values

    def model(self) -> nn.Module:
        """Two blocks of 32 channels."""
        return Transformer(nn.Embedding(10, 32), 8, 10)


class Poisson(Samples):
    """The equation u'' = f on [-1, 1] with zero ends, by a network trained to satisfy it (arXiv:1711.10561v1)."""

    metric, steps = "l2_error", 300

    def samples_(self) -> tuple[Tensor, ...]:
        """Return points."""
        return (torch.linspace(-1, 1, 320),)

    def model(self) -> nn.Module:
        """Two hidden layers of tanh."""
        return mlp(1, 32, 32, 1, act=nn.Tanh)

    @staticmethod
    def solution(x: Tensor) -> Tensor:
        """Return u."""
        return (math.pi * x).sin() + 0.3 * (3 * math.pi * x).sin()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean squared residual of the equation and of the ends."""
        x = batch[0][:, None].detach().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        f = -(math.pi**2) * ((math.pi * x).sin() + 2.7 * (3 * math.pi * x).sin())
        ends = model(torch.tensor([[-1.0], [1.0]]))
        loss: Tensor = (second - f).square().mean() / 100 + ends.square().mean() * 10
        return loss

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the relative error."""
        (x,) = self.splits[split]
        exact = self.solution(x)
        return {"l2_error": float((model(x[:, None])[:, 0] - exact).norm() / exact.norm())}


class Factors(nn.Module):
    """Neural matrix factorisation (arXiv:1708.05031v2): products of embeddings beside a network of both."""

    def __init__(self, users: int, items: int, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.network, self.head = mlp(2 * width, 16, 8), nn.Linear(width + 8, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return a rating for each pair."""
        (p, a), (q, b) = self.users(pairs[:, 0]).chunk(2, 1), self.items(pairs[:, 1]).chunk(2, 1)
        return self.head(torch.cat([p * q, self.network(torch.cat([a, b], 1)).relu()], 1))  # type: ignore[no-any-return]


class Ratings(Samples):
    """Ratings of 120 items by 200 users, of rank three under noise, by neural matrix factorisation."""

    batch_size, epochs = 64, 6.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return pairs and ratings."""
        generator = seeded()
        p, q = torch.randn(200, 3, generator=generator), torch.randn(120, 3, generator=generator)
        pairs = torch.stack([torch.randint(n, (8000,), generator=generator) for n in (200, 120)], 1)
        exact = (p[pairs[:, 0]] * q[pairs[:, 1]]).sum(1) / math.sqrt(3)
        return pairs, exact + 0.3 * torch.randn(len(exact), generator=generator)

    def model(self) -> nn.Module:
        """Embeddings of 16 numbers."""
        return Factors(200, 120)


class Values(Samples):
    """Discounted returns of a pole on a cart under a clumsy policy, as the critic of an actor-critic fits them."""

    batch_size, epochs = 64, 8.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return states and returns."""
        generator, count, discount = seeded(), 256, 0.97
        state = 0.1 * torch.randn(count, 4, generator=generator)
        states, alive = [], torch.ones(count)
        rewards = []
        for _ in range(60):
            _, v, angle, spin = state.unbind(1)
            push = torch.where(angle + 0.3 * spin + 0.2 * torch.randn(count, generator=generator) > 0, 10.0, -10.0)
            states.append(state)
            rewards.append(alive)
            force = (push + 0.05 * spin.square() * angle.sin()) / 1.1
            turn = (9.8 * angle.sin() - angle.cos() * force) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
            pull = force - 0.05 * turn * angle.cos() / 1.1
            state = state + 0.02 * torch.stack([v, pull, spin, turn], 1)
            alive = alive * (angle.abs() < 0.2).float()
            state = torch.where(alive[:, None] > 0, state, states[-1])
        returns, total = [], torch.zeros(count)
        for reward in reversed(rewards):
            total = reward + discount * total
            returns.append(total)
        keep = torch.randperm(60 * count, generator=generator)[:5000]
        values = torch.stack(returns[::-1]).flatten()[keep]
        return torch.stack(states).flatten(0, 1)[keep], (values - values.mean()) / values.std()

    def model(self) -> nn.Module:
        """Two hidden layers of tanh, as in Stable-Baselines3."""
        return mlp(4, 64, 64, 1, act=nn.Tanh)


class Recurrent(nn.Module):
    """An LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, waves: Tensor) -> Tensor:
        """Return the next value at each position."""
        return self.head(self.lstm(waves[..., None])[0])[..., 0]  # type: ignore[no-any-return]


class Waves(Samples):
    """The next value of sums of two waves, by an LSTM, after torch's example of time sequences."""

    batch_size, epochs = 16, 8.0

    def samples_(self) -> tuple[Tensor, ...]:
        """Return waves and their next values."""
        generator, count = seeded(), 500
        t = torch.arange(25.0)
        periods = 5 + 10 * torch.rand(count, 2, 1, generator=generator)
        shifts = 2 * math.pi * torch.rand(count, 2, 1, generator=generator)
        waves = (2 * math.pi * t / periods + shifts).sin().sum(1)
        return waves[:, :-1], waves[:, 1:] + 0.0

    def model(self) -> nn.Module:
        """24 units."""
        return Recurrent()


class Vae(nn.Module):
    """A variational autoencoder (arXiv:1312.6114v11) of 64 pixels and 6 hidden numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 12), mlp(6, 64, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, means and logarithms of variances."""
        mean, log_var = self.encoder(images).chunk(2, 1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (0.5 * log_var).exp()), mean, log_var


class Autoencoder(Samples):
    """The digits of scikit-learn by a variational autoencoder, after torch's example; the metric is its bound."""

    metric, epochs, batch_size = "nats", 12.0, 32

    def samples_(self) -> tuple[Tensor, ...]:
        """Return images in [0, 1]."""
        return (torch.tensor(sklearn.datasets.load_digits().data).float() / 16,)

    def model(self) -> nn.Module:
        """One hidden layer on each side."""
        return Vae()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the negative bound on the likelihood of an image, in nats."""
        (images,) = batch
        logits, mean, log_var = model(images)
        fit = binary_cross_entropy_with_logits(logits, images, reduction="sum")
        kl: Tensor = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum()
        return (fit + kl) / len(images)

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the bound at the means."""
        return {"nats": float(self.loss(model, self.splits[split]))}


class GraphNet(nn.Module):
    """A graph network of two layers (arXiv:1609.02907v4)."""

    def __init__(self, adjacency: Tensor, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 32), nn.Linear(32, classes)
        self.register_buffer("adjacency", adjacency)

    def forward(self, nodes: Tensor) -> Tensor:
        """Return logits of all nodes."""
        hidden = (self.adjacency @ self.first(nodes)).relu()
        return self.adjacency @ self.second(hidden)  # type: ignore[no-any-return]


class Graph:
    """Classes of the nodes of a stochastic block model, a tenth of them known, by a graph network."""

    metric, higher_is_better, one_thread, steps, batch_size = "accuracy", True, True, 100, 1

    def __init__(self) -> None:
        generator, count, classes = seeded(), 500, 5
        self.classes = torch.randint(classes, (count,), generator=generator)
        same = self.classes[:, None] == self.classes
        edges = (torch.rand(count, count, generator=generator) < torch.where(same, 0.03, 0.006)).float().triu(1)
        edges = edges + edges.T + torch.eye(count)
        degree = edges.sum(1).rsqrt()
        self.adjacency = degree[:, None] * edges * degree
        noise = torch.randn(count, 64, generator=generator)
        self.nodes = noise + 0.5 * one_hot(self.classes, 64)
        order = torch.randperm(count, generator=generator)
        self.splits = {"train": order[:50], "validation": order[50:250], "test": order[250:]}

    def model(self) -> nn.Module:
        """Two layers."""
        return GraphNet(self.adjacency, 64, 5)

    def batches(self, split: str, batch_size: int, generator: torch.Generator) -> list[Tensor]:  # noqa: ARG002
        """Return the known nodes of the graph, which is one batch."""
        return [self.splits[split]]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of the known nodes."""
        return cross_entropy(model(self.nodes)[batch], self.classes[batch])

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the loss and the accuracy of other nodes."""
        nodes = self.splits[split]
        logits = model(self.nodes)[nodes]
        right = (logits.argmax(1) == self.classes[nodes]).float().mean()
        return {"loss": float(cross_entropy(logits, self.classes[nodes])), "accuracy": float(right)}


UNSEEN = (
    *(Diabetes, Friedman, Textures, Shapes, Markov, Sorting),
    *(Poisson, Ratings, Values, Waves, Autoencoder, Graph),
)
