"""D-FINE the whole way: trained with its own loss, a plan with an open batch, ONNX, a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.d_fine import modeling_d_fine as theirs

from tessella import api
from tessella.core.errors import UsageError
from tessella.device.x86 import code
from tessella.nn import zoo
from tessella.nn.zoo import d_fine
from tessella.nn.zoo.detr import boxes_and_scores
from tests.support.detectors import goes_the_whole_way, kernels_of, trained

SIZE = 64


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """D-FINE-N with a layer where it has several: torch.export takes seconds for all of them."""
    backbone = {"stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1]}
    monkeypatch.setitem(d_fine.BACKBONES, "d_fine_n", {**d_fine.BACKBONES["d_fine_n"], **backbone})
    fewer = {**d_fine.DETECTORS["d_fine_n"], "decoder_layers": 1, "depth_mult": 0.1}
    monkeypatch.setitem(d_fine.DETECTORS, "d_fine_n", fewer)


def test_the_whole_way(few_layers: None, captured_once: None, tmp_path: Path) -> None:
    """A toy, which learns next to nothing: what counts is that plan and checkpoint say the same."""
    run, dataset = trained(
        tmp_path, "d_fine_n", size=SIZE, val=3, epochs=2, batch_size=2, val_interval=2,
        solver={"name": "adamw", "lr": 1e-3},
    )  # fmt: skip
    made = goes_the_whole_way(tmp_path, run)
    looking = [name for name in kernels_of(made) if name.startswith("deformable_attention.")]
    assert looking == [f"deformable_attention.{code.require_instructions().name}"]
    report = api.verify(tmp_path / "net.plan", against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.max_abs_diff < 1e-4


def test_it_answers_and_learns_as_hugging_face_s_does(few_layers: None) -> None:
    """Boxes, scores, loss and gradients beside their own attention, which samples by levels."""
    torch.manual_seed(0)
    record = zoo.network("d_fine_n", classes=3, size=SIZE, answers="boxes")
    module = zoo.build(record).train()
    images, targets = torch.randn(2, 3, SIZE, SIZE), torch.full((2, 3, 6), -1.0)
    targets[0, 0] = torch.tensor([0.1, 0.2, 0.5, 0.6, 2, 0])
    targets[1, :2] = torch.tensor([[0.5, 0.5, 0.9, 0.8, 0, 0], [0, 0, 1, 1, 1, 1]])  # and a crowd
    layers = module.network.model.decoder.layers
    state = {name: value.clone() for name, value in module.state_dict().items()}
    grads, losses, answers = [], [], []
    for own in (True, False):
        if not own:
            for layer in layers:
                layer.encoder_attn = _their_attention(layer.encoder_attn, module.network.config)
        torch.manual_seed(1)
        if own:
            loss = module(images, targets)[0]
        else:
            labels = [
                {"class_labels": torch.tensor([2]), "boxes": torch.tensor([[0.3, 0.4, 0.4, 0.4]])},
                {"class_labels": torch.tensor([0]), "boxes": torch.tensor([[0.7, 0.65, 0.4, 0.3]])},
            ]
            loss = module.network(images, labels=labels).loss
        (grad,) = torch.autograd.grad(loss, layers[0].encoder_attn.sampling_offsets.weight)
        module.load_state_dict(state, strict=False)  # the norms have moved
        with torch.no_grad():
            module.eval()
            answers.append(module(images) if own else _their_answer(module, images))
        module.train()
        grads.append(grad)
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-2, atol=1e-2)


def _their_answer(module: d_fine.DFine, images: torch.Tensor) -> torch.Tensor:
    """By their whole forward pass, of which ours leaves out what only a loss reads."""
    made = module.network(images)
    return boxes_and_scores(made.pred_boxes, made.logits)


def _their_attention(own: d_fine.Attention, config: Any) -> torch.nn.Module:
    made = theirs.DFineMultiscaleDeformableAttention(config)
    made.sampling_offsets, made.attention_weights = own.sampling_offsets, own.attention_weights
    return made


def test_pictures_without_things_are_learned_from(few_layers: None) -> None:
    module = zoo.build(zoo.network("d_fine_n", classes=2, size=SIZE, answers="boxes")).train()
    loss, overlap = module(torch.randn(2, 3, SIZE, SIZE), torch.full((2, 1, 6), -1.0))
    loss.backward()
    assert loss.isfinite()
    assert overlap.isfinite()
    assert not [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def test_published_weights_see_pixels_as_they_were_trained(few_layers: None) -> None:
    """ImageNet's normalization folded into the first convolution, away from the border."""
    record = zoo.network("d_fine_n", classes=2, size=SIZE, answers="boxes")
    stem = zoo.build(record).eval().network.model.backbone.model.embedder.stem1
    pixels = torch.rand(1, 3, SIZE, SIZE)
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1) for v in (d_fine.IMAGENET_MEAN, d_fine.IMAGENET_STD)
    )
    with torch.no_grad():
        right = stem(pixels)
        d_fine.fold_normalization(stem)
        made = stem((pixels - mean) / std)
    torch.testing.assert_close(made[..., 1:-1, 1:-1], right[..., 1:-1, 1:-1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(F.pad(made, (0,) * 4)[..., 0, 0], right[..., 0, 0], atol=1e-3)


def test_what_cannot_be_built_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    record = zoo.network("d_fine_s", classes=2, size=(96, 100), answers="boxes")
    with pytest.raises(UsageError, match=r"multiples of 32.*96×96"):
        zoo.build(record)
    grey = zoo.network("d_fine_n", classes=2, size=SIZE, channels=1, answers="boxes")
    with pytest.raises(UsageError, match="three channels"):
        zoo.build(grey, pretrained=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'tessella\[detectors\]'"):
        zoo.build(zoo.network("d_fine_m", classes=2, answers="boxes"))
