"""Functions shared by several methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.tasks.classes import cross_entropy as cross_entropy


def kl_divergence(
    teacher_log_probs: Tensor, student_log_probs: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Σ_c weight^c p^c (log p^c - log q^c) for each sample: ``[B]`` from log-probabilities ``[B, C]``."""
    probs = teacher_log_probs.exp() if weight is None else weight * teacher_log_probs.exp()
    return (probs * (teacher_log_probs - student_log_probs)).sum(-1)


def smooth_l1(difference: Tensor) -> Tensor:
    """d²/2 within ±1 and |d| - 1/2 beyond, of each value."""
    # The slope is the gradient. Under vmap, F.smooth_l1_loss takes a dozen operations.
    slope = difference.detach().clamp(-1, 1)
    return slope * (difference - slope / 2)


def prototype_scores(features: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Negative mean squared distances to prototypes: ``[B, C]``; classes not ``known`` score below all others."""
    scores = -torch.cdist(features, prototypes).square() / features.shape[-1]
    return torch.where(known > 0, scores, scores.amin(-1, keepdim=True) - 1)


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """The logits of the classes other than a sample's own: ``[B, C-1]`` from ``[B, C]``."""
    places = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, places + (places >= y.unsqueeze(-1)).long())


def not_true_distillation(student: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    """τ² KL(softmax of the teacher's not-true logits / τ ‖ the student's), for each sample: ``[B]``."""
    p = F.log_softmax(not_true(teacher, y) / tau, dim=-1)
    q = F.log_softmax(not_true(student, y) / tau, dim=-1)
    return tau**2 * kl_divergence(p, q)


def class_means(features: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Mean feature of each class ``[C, d]`` (zeros where absent) and sample counts ``[C]``.

    ``features`` is ``[B, d]``, ``members`` ``[B, C]`` of 0 and 1.
    """
    counts = members.sum(0)
    return members.T @ features / counts.clamp(min=1).unsqueeze(-1), counts


def momentum_steps(steps: float, momentum: float) -> float:
    """The distance of ``steps`` SGD steps with a constant gradient, in units of one step: a_k of FedNova.

    [τ - ρ(1 - ρ^τ)/(1 - ρ)] / (1 - ρ), which is τ without momentum.
    """
    rho = momentum
    return float((steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho))


def norm(tensors: dict[str, Tensor]) -> Tensor:
    """The 2-norm over all tensors."""
    return torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt()


def ascend(params: dict[str, Tensor], direction: dict[str, Tensor], rho: float) -> dict[str, Tensor]:
    """w + ρ d / ‖d‖, with the norm over all parameters; w where d is zero."""
    scale = rho / (norm(direction) + 1e-12)
    return {k: p + scale * direction[k] for k, p in params.items()}


def subtract(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """a - b by name, with fused kernels on a GPU."""
    return dict(zip(a, torch._foreach_sub(list(a.values()), [b[k] for k in a]), strict=True))


def divide(a: dict[str, Tensor], divisor: float) -> dict[str, Tensor]:
    """a / divisor by name, with fused kernels on a GPU."""
    return dict(zip(a, torch._foreach_div(list(a.values()), divisor), strict=True))


def classifier_matrix(classifier: dict[str, Tensor]) -> Tensor:
    """A linear layer's parameters as one matrix: ``[C, d]``, or ``[C, d+1]`` with the bias as last column."""
    weight_first = sorted(classifier.values(), key=lambda p: -p.ndim)
    return torch.cat([p if p.ndim == 2 else p.unsqueeze(1) for p in weight_first], dim=1)


def classifier_inputs(features: Tensor, matrix: Tensor) -> Tensor:
    """Features ``[B, d]``, with a column of ones appended if ``matrix`` has a bias column."""
    return F.pad(features, (0, matrix.shape[-1] - features.shape[-1]), value=1.0)


def fit_classifier(matrix: Tensor, inputs: Tensor, y: Tensor, batches: Iterable[Tensor], lr: float) -> Tensor:
    """The matrix after plain SGD on cross-entropy, one step for each batch (row numbers of ``inputs``).

    Runs on the CPU: for thousands of small sequential steps, a GPU's launch overhead exceeds the computation.
    """
    inputs, fitted = inputs.cpu(), matrix.cpu()
    targets = F.one_hot(y.cpu(), len(matrix)).to(inputs.dtype)
    for rows in batches:
        x = inputs[rows]
        error = (x @ fitted.T).softmax(-1) - targets[rows]
        fitted = torch.addmm(fitted, error.T, x, alpha=-lr / len(rows))
    return fitted.to(matrix.device)


def shuffled_batches(rng: np.random.Generator, rows: int, size: int, epochs: int) -> Iterator[Tensor]:
    """Row numbers of each batch of several epochs, reshuffled for each; a shorter last batch is kept."""
    for _ in range(epochs):
        yield from torch.split(torch.from_numpy(rng.permutation(rows)), size)
