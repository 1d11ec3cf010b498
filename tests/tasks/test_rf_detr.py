"""RF-DETR the whole way: trained with its own loss, a plan with an open batch, ONNX, a server."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.rf_detr import modeling_rf_detr as theirs

from tessella import api
from tessella.core.errors import UsageError
from tessella.device.x86 import code
from tessella.nn import zoo
from tessella.nn.zoo import rf_detr
from tessella.nn.zoo.detr import boxes_and_scores
from tests.support.detectors import goes_the_whole_way, kernels_of, trained

SIZE = 64


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """RF-DETR-N with few layers, narrow ones: torch.export takes seconds for all of them."""
    smaller = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    monkeypatch.setattr(rf_detr, "BACKBONE", {**smaller, "out_indices": [1, 2]})
    fewer = {"decoder_layers": 1, "group_detr": 2, "d_model": 64, "c2f_num_blocks": 1}
    monkeypatch.setitem(rf_detr.DETECTORS, "rf_detr_n", fewer)


def built(classes: int = 3) -> rf_detr.RfDetr:
    torch.manual_seed(0)
    module = zoo.build(zoo.network("rf_detr_n", classes=classes, size=SIZE, answers="boxes"))
    assert isinstance(module, rf_detr.RfDetr)
    return module


def test_the_whole_way(few_layers: None, captured_once: None, tmp_path: Path) -> None:
    """A toy, which learns next to nothing: what counts is that plan and checkpoint say the same."""
    run, _ = trained(
        tmp_path, "rf_detr_n", size=SIZE, val=3, epochs=1, batch_size=2, val_interval=1,
        solver={"name": "adamw", "lr": 1e-4},
    )  # fmt: skip
    assert "val/map" in api.open_checkpoint(run).info.metrics
    made = goes_the_whole_way(tmp_path, run)
    looking = [name for name in kernels_of(made) if name.startswith("deformable_attention.")]
    assert looking == [f"deformable_attention.{code.require_instructions().name}"]


def test_it_answers_and_learns_as_hugging_face_s_does(few_layers: None) -> None:
    """Boxes, scores, loss and gradients beside their own attention."""
    module = built()
    images, targets = torch.randn(2, 3, SIZE, SIZE), torch.full((2, 3, 6), -1.0)
    targets[0, 0] = torch.tensor([0.1, 0.2, 0.5, 0.6, 2, 0])
    targets[1, :2] = torch.tensor([[0.5, 0.5, 0.9, 0.8, 0, 0], [0, 0, 1, 1, 1, 1]])  # and a crowd
    layer = module.network.model.decoder.layers[0]
    torch.nn.init.normal_(layer.cross_attn.attention_weights.weight, std=0.3)
    made = []
    for own in (True, False):
        if not own:
            layer.cross_attn = _their_attention(layer.cross_attn, module.network.config)
        with torch.no_grad():  # theirs by their whole forward pass
            module.eval()
            answer = module(images) if own else _their_answer(module, images)
        loss = module.train()(images, targets)[0]
        (grad,) = torch.autograd.grad(loss, layer.cross_attn.sampling_offsets.weight)
        made.append((answer, loss.detach(), grad))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _their_answer(module: rf_detr.RfDetr, images: torch.Tensor) -> torch.Tensor:
    made = module.network(images)
    return boxes_and_scores(made.pred_boxes, made.logits)


def test_large_pictures_begin_no_box_at_their_border(few_layers: None) -> None:
    """From 800 pixels on, where the middle of the first patch is nearer than a hundredth."""
    places, inside = rf_detr.places_of((800, 800))
    assert 0 < int(inside.sum()) < len(places)
    record = zoo.network("rf_detr_n", classes=3, size=800, answers="boxes")
    module, images = zoo.build(record).eval(), torch.randn(1, 3, 800, 800)
    with torch.no_grad():
        torch.testing.assert_close(
            module(images), _their_answer(module, images), rtol=1e-4, atol=1e-5
        )


def _their_attention(own: rf_detr.Attention, config: Any) -> torch.nn.Module:
    made = theirs.RfDetrMultiscaleDeformableAttention(config, own.heads, own.points)
    for name in ("sampling_offsets", "attention_weights", "value_proj", "output_proj"):
        setattr(made, name, getattr(own, name))
    return made


def test_places_of_patches_are_brought_to_the_size_as_hugging_face_s_does(
    few_layers: None,
) -> None:
    module = built()
    embeddings = module.network.model.backbone.backbone.embeddings
    pictures = torch.randn(1, 3, 2 * SIZE, 2 * SIZE)
    patches = torch.zeros(1, 1 + (2 * SIZE // rf_detr.PATCH) ** 2, 48)
    right = type(embeddings).interpolate_pos_encoding(embeddings, patches, *pictures.shape[2:])
    rf_detr.place_once(embeddings, (2 * SIZE, 2 * SIZE))
    torch.testing.assert_close(embeddings.position_embeddings, right)
    assert embeddings.interpolate_pos_encoding(patches, 2 * SIZE, 2 * SIZE) is (
        embeddings.position_embeddings
    )


def test_pictures_without_things_are_learned_from(few_layers: None) -> None:
    module = built(classes=2).train()
    loss, overlap = module(torch.randn(2, 3, SIZE, SIZE), torch.full((2, 1, 6), -1.0))
    loss.backward()
    assert loss.isfinite()
    assert overlap == 0
    assert not [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def test_what_cannot_be_built_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, fit in ((96, 128), "128×128"), ((100, 100), "96×96"):
        record = zoo.network("rf_detr_s", classes=2, size=size, answers="boxes")
        with pytest.raises(UsageError, match=rf"multiples of 32.*{fit}"):
            zoo.build(record)
    grey = zoo.network("rf_detr_n", classes=2, size=SIZE, channels=1, answers="boxes")
    with pytest.raises(UsageError, match="three channels"):
        zoo.build(grey, pretrained=True)
    usual = zoo.network("rf_detr_m", classes=2, answers="boxes")
    assert (usual.height, usual.width) == (576, 576)
    with monkeypatch.context() as patch:
        old = SimpleNamespace(__version__="5.0")
        patch.setattr(rf_detr, "require_transformers", lambda _: old)
        with pytest.raises(UsageError, match="has no RF-DETR"):
            zoo.build(usual)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"RF-DETR needs transformers.*tessella\[detectors\]"):
        zoo.build(usual)
