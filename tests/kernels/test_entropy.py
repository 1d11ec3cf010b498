"""The cross entropy of a training beside float64, both ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels.softmax import entropy

EPS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of a gradient, by its norm


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_losses_and_gradient(dtype, monkeypatch):
    """Rows longer than a tile; scores far apart, without hope, and rows that do not count."""
    monkeypatch.setattr(entropy, "_COLUMNS", 32)
    monkeypatch.setattr(entropy, "_GRADIENT_COLUMNS", 64)
    torch.manual_seed(0)
    scores = (torch.randn(6, 101) * 20).to(dtype)
    scores[1, :40] = -float("inf")
    targets = torch.tensor([3, 100, -100, 0, 57, 7])
    reference = scores.double().requires_grad_()
    expected = F.cross_entropy(reference, targets, reduction="none")
    (expected.sum() * 0.25).backward()
    assert entropy.runs(scores, targets)
    found, norms = entropy.losses(scores, targets, -100)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-6, atol=2e-5)
    made = entropy.gradient(scores, targets, norms, torch.tensor(0.25), -100)
    assert made.dtype == dtype
    assert not made[2].any()
    assert (made.double() - reference.grad).norm() < EPS[dtype] * reference.grad.norm()


@pytest.mark.parametrize("target", [-1, 5, 1 << 40])
def test_a_class_that_there_is_not_has_no_loss(target):
    """torch ends the process' kernel; a training stops at NaN, and reads no other row."""
    scores, targets = torch.randn(4, 5), torch.tensor([0, 1, target, 2])
    found, _ = entropy.losses(scores, targets, -100)
    assert found.isnan().tolist() == [False, False, True, False]


def test_what_does_not_run():
    scores, targets = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)
    assert entropy.runs(scores, targets)
    assert not entropy.runs(scores.double(), targets)
    assert not entropy.runs(scores.t(), torch.zeros(5, dtype=torch.int64))
    assert not entropy.runs(scores, torch.zeros(4, 5))  # shares of all classes
    assert not entropy.runs(torch.zeros(4, 5, 2), torch.zeros(4, 2, dtype=torch.int64))
