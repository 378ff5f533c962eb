"""What ``agentcomm bench accuracy`` trains: small models that depend on the seed alone."""

import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentcomm.bench._shared import BenchError, require

WARMUP_NSTEPS = 20  # of the learning rate


class Task(ABC):
    """A model, its data and its optimizer, all functions of (seed, step, rank, nranks).

    Attributes:
        name: of the task on the command line.
        metrics: what is measured after training; the first one counts.
        better: "lower" or "higher", of the first one.
        nsteps_default: of training.
        batch_nitems: of one rank in one step.
        lr: the learning rate's peak.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    better: ClassVar[str]
    nsteps_default: ClassVar[int]
    batch_nitems: ClassVar[int]
    lr: ClassVar[float]

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    @abstractmethod
    def nitems(self) -> int:
        """Number of items to train on."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a model; torch's random numbers decide its weights."""

    @abstractmethod
    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""

    @abstractmethod
    def loss(self, model: nn.Module, items: Tensor) -> Tensor:
        """Return the mean loss of a model on items, given by their numbers."""

    @abstractmethod
    def evaluate(self, model: nn.Module, rank: int, nranks: int) -> tuple[float, ...]:
        """Return, for this rank's part, the sum of every metric, and the number of items."""

    def batch(self, step: int, rank: int, nranks: int) -> Tensor:
        """Return the items of one rank in one step: every epoch is dealt out to the ranks."""
        per_step = self.batch_nitems * nranks
        epoch, place = divmod(step, self.nitems // per_step)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        dealt = torch.randperm(self.nitems, generator=generator)[place * per_step :]
        return dealt[rank:per_step:nranks]

    def learning_rate(self, step: int, nsteps: int) -> float:
        """Rise linearly, then follow a cosine down to nothing."""
        if step < WARMUP_NSTEPS:
            return self.lr * (step + 1) / WARMUP_NSTEPS
        done_frac = (step - WARMUP_NSTEPS) / max(1, nsteps - WARMUP_NSTEPS)
        return self.lr * (0.5 + 0.5 * math.cos(math.pi * done_frac))


# ---- gpt -----------------------------------------------------------------------------------------


class _Gpt(nn.Module):
    """Transformer over bytes."""

    NLAYERS, WIDTH, NHEADS, NTOKENS, VOCAB = 2, 128, 4, 64, 256

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCAB, self.WIDTH)
        self.place = nn.Embedding(self.NTOKENS, self.WIDTH)
        for embedding in (self.embed, self.place):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.WIDTH, self.NHEADS, 4 * self.WIDTH, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True, bias=False,
            )
            for _ in range(self.NLAYERS)
        )  # fmt: skip
        self.norm = nn.LayerNorm(self.WIDTH, bias=False)
        self.head = nn.Linear(self.WIDTH, self.VOCAB, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of each byte given those before it."""
        tokens, targets = text[:, :-1], text[:, 1:]
        x = self.embed(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(self.NTOKENS)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class GptTask(Task):
    """A byte-level GPT of 0.5 M parameters on the modules of the standard library."""

    name = "gpt"
    metrics = ("validation loss (nats per byte)",)
    better = "lower"
    nsteps_default = 4000
    batch_nitems = 8
    lr = 1e-3
    VALIDATION_NWINDOWS = 512
    VALIDATION_BATCH_NITEMS = 32

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        if len(files) < 2:
            raise BenchError("the standard library's source files, the text for gpt, are missing")
        # No file is on both sides.
        self._train = _text(path for number, path in enumerate(files) if number % 10)
        self._held_out = _text(files[::10])

    @property
    def nitems(self) -> int:
        """Number of windows that do not overlap."""
        return (len(self._train) - 1) // _Gpt.NTOKENS

    def model(self) -> nn.Module:
        """Return the GPT."""
        return _Gpt()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW with torch's defaults, betas included: docs/codecs.md, *Optimizers*."""
        return torch.optim.AdamW(params, self.lr)

    def loss(self, model: nn.Module, items: Tensor) -> Tensor:
        """Return the mean cross-entropy of windows."""
        loss: Tensor = model(_windows(self._train, items * _Gpt.NTOKENS))
        return loss

    def evaluate(self, model: nn.Module, rank: int, nranks: int) -> tuple[float, ...]:
        """Return the summed loss of windows spread evenly over the held-out text."""
        last = len(self._held_out) - _Gpt.NTOKENS - 1
        starts = torch.linspace(0, last, self.VALIDATION_NWINDOWS, dtype=torch.float64).long()
        own = starts[rank::nranks]
        total = 0.0
        for part in torch.split(own, self.VALIDATION_BATCH_NITEMS):
            total += model(_windows(self._held_out, part)).item() * len(part)
        return total, len(own)


def _text(files: Iterable[Path]) -> Tensor:
    data = bytearray()
    for path in files:
        data += path.read_bytes()
    return torch.frombuffer(data, dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    """Return (starts, NTOKENS + 1) bytes: inputs and targets overlap."""
    return text[starts[:, None] + torch.arange(_Gpt.NTOKENS + 1)].long()


# ---- digits --------------------------------------------------------------------------------------


class DigitsTask(Task):
    """A perceptron with two hidden layers on scikit-learn's 8 x 8 digits."""

    name = "digits"
    metrics = ("test accuracy (%)", "test loss")
    better = "higher"
    nsteps_default = 300
    batch_nitems = 16
    lr = 0.05
    HIDDEN = 256
    TEST_FRAC = 0.3

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        images, labels = require("sklearn.datasets").load_digits(return_X_y=True)
        parts = require("sklearn.model_selection").train_test_split(
            images, labels, test_size=self.TEST_FRAC, random_state=seed, stratify=labels
        )
        tensors = [torch.from_numpy(part) for part in parts]
        self._images, self._test_images = (part.float() / 16 for part in tensors[:2])
        self._labels, self._test_labels = (part.long() for part in tensors[2:])

    @property
    def nitems(self) -> int:
        """Number of images."""
        return len(self._images)

    def model(self) -> nn.Module:
        """Return the perceptron, 85 k parameters."""
        return nn.Sequential(
            nn.Linear(64, self.HIDDEN), nn.ReLU(), nn.Linear(self.HIDDEN, self.HIDDEN), nn.ReLU(),
            nn.Linear(self.HIDDEN, 10),
        )  # fmt: skip

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(params, self.lr, momentum=0.9)

    def loss(self, model: nn.Module, items: Tensor) -> Tensor:
        """Return the mean cross-entropy of images."""
        return F.cross_entropy(model(self._images[items]), self._labels[items])

    def evaluate(self, model: nn.Module, rank: int, nranks: int) -> tuple[float, ...]:
        """Return 100 times the number of test images that are recognised, and their loss."""
        labels = self._test_labels[rank::nranks]
        logits = model(self._test_images[rank::nranks])
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return 100.0 * int((logits.argmax(1) == labels).sum()), loss.item(), len(labels)


TASKS: dict[str, type[Task]] = {task.name: task for task in (GptTask, DigitsTask)}
