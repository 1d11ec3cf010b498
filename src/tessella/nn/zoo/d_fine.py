"""D-FINE N, S and M: Hugging Face's networks, which answer as our other detectors do.

Peng et al., D-FINE: redefine regression task of DETRs as fine-grained distribution refinement,
arXiv:2410.13842. Queries look at a few points of the picture's features around their boxes; each
learns one thing, or nothing, so that no box has to be suppressed.
"""

from __future__ import annotations

from typing import Any

import httpx
import torch
from torch import Tensor, nn

from tessella.core.errors import UsageError
from tessella.nn.zoo.standard import IMAGENET_MEAN, IMAGENET_STD
from tessella.operations.reference.detect import deformable_attention

QUERIES = 300
STEP = 32  # height and width are multiples of the coarsest features' stride

# By name: what differs from ``transformers``' defaults, which are D-FINE-L's, as its script that
# converts the published weights has it.
_SMALL_BACKBONE: dict[str, Any] = {
    "stem_channels": [3, 16, 16],
    "stage_in_channels": [16, 64, 256, 512],
    "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024],
    "hidden_sizes": [64, 256, 512, 1024],
    "stage_num_blocks": [1, 1, 2, 1],
    "stage_numb_of_layers": [3, 3, 3, 3],
    "embedding_size": 16,
}
BACKBONES: dict[str, dict[str, Any]] = {
    "d_fine_n": {**_SMALL_BACKBONE, "out_indices": [3, 4]},
    "d_fine_s": {**_SMALL_BACKBONE, "out_indices": [2, 3, 4]},
    "d_fine_m": {
        "stem_channels": [3, 24, 32],
        "stage_in_channels": [32, 96, 384, 768],
        "stage_mid_channels": [32, 64, 128, 256],
        "stage_out_channels": [96, 384, 768, 1536],
        "hidden_sizes": [96, 384, 768, 1536],
        "stage_num_blocks": [1, 1, 3, 1],
        "stage_numb_of_layers": [4, 4, 4, 4],
        "embedding_size": 32,
        "out_indices": [2, 3, 4],
    },
}
DETECTORS: dict[str, dict[str, Any]] = {
    "d_fine_n": {
        "feat_strides": [16, 32],
        "num_feature_levels": 2,
        "encoder_in_channels": [512, 1024],
        "encode_proj_layers": [1],
        "encoder_hidden_dim": 128,
        "encoder_ffn_dim": 512,
        "d_model": 128,
        "decoder_in_channels": [128, 128],
        "decoder_ffn_dim": 512,
        "decoder_n_points": [6, 6],
        "decoder_layers": 3,
        "hidden_expansion": 0.34,
        "depth_mult": 0.5,
    },
    "d_fine_s": {
        "encoder_in_channels": [256, 512, 1024],
        "decoder_n_points": [3, 6, 3],
        "decoder_layers": 3,
        "hidden_expansion": 0.5,
        "depth_mult": 0.34,
    },
    "d_fine_m": {
        "encoder_in_channels": [384, 768, 1536],
        "decoder_n_points": [3, 6, 3],
        "decoder_layers": 4,
        "depth_mult": 0.67,
    },
}
PUBLISHED = {
    "d_fine_n": "ustc-community/dfine-nano-coco",
    "d_fine_s": "ustc-community/dfine-small-coco",
    "d_fine_m": "ustc-community/dfine-medium-coco",
}


class DFine(nn.Module):
    """The network: ``[N, channels, H, W]`` to boxes ``[N, Q, 4 + classes]``, or to its loss.

    Args:
        network: a ``DFineForObjectDetection``, which becomes part of this.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        for layer in network.model.decoder.layers:
            layer.encoder_attn = Attention(layer.encoder_attn)
        # the heads stand in the decoder, too, and only those are called
        del network.class_embed, network.bbox_embed
        self.network = network

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``).

        The overlap is the generalized one of boxes that learn a thing, of the last layer.
        """
        if targets is None:
            made = self.network(images)
            return boxes_and_scores(made.pred_boxes, made.logits)
        things = [things_of(of) for of in targets]
        made = self.network(images, labels=things)
        apart = made.loss_dict["loss_giou"].detach() / self.network.config.weight_loss_giou
        # data-parallel training wants all parameters, and without things nothing is denoised
        unused = 0 * self.network.model.denoising_class_embed.weight.sum()
        return torch.stack([made.loss.float() + unused, (1 - apart).clamp(min=0).float()])


def boxes_and_scores(boxes_NQ4: Tensor, logits_NQK: Tensor) -> Tensor:
    """Boxes of middle and sides, and logits, as our detectors answer."""
    boxes = boxes_NQ4.float()
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    boxes = torch.cat([middle - half, middle + half], 2).clamp(0, 1)
    return torch.cat([boxes, logits_NQK.float().sigmoid()], 2).to(logits_NQK.dtype)


def things_of(targets_M6: Tensor) -> dict[str, Tensor]:
    """What of a picture's targets is learned, as Hugging Face's loss wants it: no crowds."""
    kept = targets_M6[(targets_M6[:, 4] >= 0) & (targets_M6[:, 5] == 0)]
    low, high = kept[:, :2], kept[:, 2:4]
    boxes = torch.cat([(low + high) / 2, high - low], 1)
    return {"class_labels": kept[:, 4].long(), "boxes": boxes}


class Attention(nn.Module):
    """Deformable attention as one operation; its weights are called as Hugging Face's.

    Theirs samples each level by itself, compares sizes by their values, and keeps weights that
    nobody reads.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.sampling_offsets = theirs.sampling_offsets
        self.attention_weights = theirs.attention_weights
        self.heads, self.spread = int(theirs.n_heads), float(theirs.offset_scale)
        self.points = tuple(map(int, theirs.num_points_list))

    def forward(
        self,
        hidden_states: Tensor,
        *,
        encoder_hidden_states: Tensor,
        reference_points: Tensor,
        spatial_shapes_list: list[tuple[int, int]],
        **_: object,
    ) -> tuple[Tensor, None]:
        sizes = tuple(side for size in spatial_shapes_list for side in size)
        exporting = torch.compiler.is_exporting()
        look = torch.ops.tessella.deformable_attention if exporting else deformable_attention
        seen = look(
            encoder_hidden_states,
            reference_points[:, :, 0],
            self.sampling_offsets(hidden_states),
            self.attention_weights(hidden_states),
            heads=self.heads,
            sizes=sizes,
            points=self.points,
            spread=self.spread,
        )
        return seen, None


def build(
    name: str, *, classes: int, channels: int, height: int, width: int, pretrained: bool
) -> nn.Module:
    """The network with fresh weights, or with those learned from COCO, the classes' aside.

    Raises:
        UsageError: transformers is not installed, sides that are no multiples of ``STEP``, or
            pretrained weights that cannot be had.
    """
    if height % STEP or width % STEP:
        raise UsageError(
            f"height and width of {name} are multiples of {STEP}",
            seen=f"{height}×{width}",
            fix=f"import the pictures at {_multiple(height)}×{_multiple(width)}",
        )
    hub = require_transformers()
    backbone = hub.HGNetV2Config(
        **{**BACKBONES[name], "stem_channels": [channels, *BACKBONES[name]["stem_channels"][1:]]},
        num_channels=channels,
        use_learnable_affine_block=True,
    )
    strides = DETECTORS[name].get("feat_strides", (8, 16, 32))
    places = sum((height // stride) * (width // stride) for stride in strides)
    config = hub.DFineConfig(
        backbone_config=backbone,
        num_labels=classes,
        num_queries=min(QUERIES, places),
        freeze_backbone_batch_norms=False,  # nothing normalizes a network that starts from nothing
        tie_word_embeddings=False,  # each layer has heads of its own, as published
        attn_implementation={"": "sdpa", "backbone_config": "eager"},
        **DETECTORS[name],
    )
    if not pretrained:
        return DFine(hub.DFineForObjectDetection(config))
    return DFine(_published(hub, name, config, channels))


def _multiple(side: int) -> int:
    return max(STEP, round(side / STEP) * STEP)


def require_transformers(network: str = "D-FINE") -> Any:
    """Hugging Face's transformers, whose import takes seconds.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{network} needs transformers, which is not installed",
            seen=str(error),
            fix="pip install 'tessella[detectors]', or: pip install transformers",
        ) from error
    return transformers


def _published(hub: Any, name: str, config: Any, channels: int) -> Any:
    """The weights that its authors learned from COCO, for pictures normalized as ImageNet's."""
    if channels != 3:
        raise UsageError(
            f"the published weights of {name} are for pictures of three channels",
            seen=f"{channels} channels",
            fix="import the pictures in color, or start from random weights",
        )
    try:
        network = hub.DFineForObjectDetection.from_pretrained(
            PUBLISHED[name], config=config, ignore_mismatched_sizes=True
        )
    except (OSError, httpx.HTTPError) as error:
        raise UsageError(
            f"the pretrained weights of {name} could not be fetched",
            seen=str(error).splitlines()[0][:200],
            fix="go online once (the file is cached), or start from random weights or a checkpoint",
        ) from error
    fold_normalization(network.model.backbone.model.embedder.stem1)
    return network


def fold_normalization(stem: Any) -> None:
    """Make a first layer that learned pixels from 0 to 1 say the same of ImageNet's normalized.

    Exact but for the border, where padding is zero before and after.
    """
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    with torch.no_grad():
        stem.normalization.running_mean -= (stem.convolution.weight.sum((2, 3)) * mean).sum(1)
        stem.convolution.weight *= std.view(1, 3, 1, 1)
