"""D-FINE N, S and M: Hugging Face's networks, which answer as our other detectors do.

Peng et al., D-FINE: redefine regression task of DETRs as fine-grained distribution refinement,
arXiv:2410.13842. Queries look at a few points of the picture's features around their boxes; each
learns one thing, or nothing, so that no box has to be suppressed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tessella.artifacts.checkpoint import Network
from tessella.core.errors import UsageError
from tessella.nn.zoo.detr import (
    at,
    best_places,
    boxes_and_scores,
    looking,
    pixels,
    published,
    require_transformers,
    sides_twice,
    things_of,
)
from tessella.nn.zoo.matching import Matcher, with_names
from tessella.nn.zoo.standard import IMAGENET_MEAN, IMAGENET_STD

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

    _edges: Tensor

    def __init__(self, network: Any) -> None:
        super().__init__()
        for layer in network.model.decoder.layers:
            layer.encoder_attn = Attention(layer.encoder_attn)
        # the heads stand in the decoder, too, and only those are called
        del network.class_embed, network.bbox_embed
        network.loss_function = _loss_of(network)
        self.network = network
        self.register_buffer("_edges", torch.tensor(EDGES), persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``).

        The overlap is the generalized one of boxes that learn a thing, of the last layer.
        """
        if targets is None:
            return boxes_and_scores(*self._found(images))
        things = [things_of(of) for of in targets]
        made = self.network(images, labels=things)
        apart = made.loss_dict["loss_giou"].detach() / self.network.config.weight_loss_giou
        # data-parallel training wants all parameters, and without things nothing is denoised
        unused = 0 * self.network.model.denoising_class_embed.weight.sum()
        return torch.stack([made.loss.float() + unused, (1 - apart).clamp(min=0).float()])

    def _found(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [N, Q, 4] of middle and sides, and logits [N, Q, classes].

        As Hugging Face's forward pass answers, without what only its loss reads: boxes of the
        coarse places that no query starts from, and scores of all layers but the last.
        """
        model = self.network.model
        maps = model.backbone.model(images).feature_maps
        maps = [turn(map) for turn, map in zip(model.encoder_input_proj, maps)]
        maps = model.encoder(maps).last_hidden_state
        maps = [turn(map) for turn, map in zip(model.decoder_input_proj, maps)]
        sizes = [(map.shape[2], map.shape[3]) for map in maps]
        memory = torch.cat([pixels(map) for map in maps], 1)
        anchors, known = model.generate_anchors(
            tuple(sizes), device=memory.device, dtype=memory.dtype
        )
        told = model.enc_output(known.to(memory.dtype) * memory)
        places = best_places(model.enc_score_head(told).amax(2), self.network.config.num_queries)
        told = at(told, places)
        starts = at(anchors.expand(len(images), -1, -1), places)
        points = (model.enc_bbox_head(told) + starts).sigmoid()
        return self._refined(told, points, memory, sizes)

    def _refined(
        self, queries: Tensor, points: Tensor, memory: Tensor, sizes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """The decoder: each layer tells the edges' shifts as distributions over bins.

        Shifts of a box's edges, in units of its sides, become those of its middle and sides by one
        product, so that a box is ``first + shifts · sides of first``.
        """
        decoder = self.network.model.decoder
        bins, scale = decoder.max_num_bins + 1, decoder.reg_scale.abs()
        values = weights_of_bins(decoder.max_num_bins, decoder.up, decoder.reg_scale)
        shifts = (self._edges[:, :, None] * values / scale).flatten(1)  # [4, 4 · bins]
        first = sides = points
        before, corners = queries.new_zeros(()), queries.new_zeros(())
        for number, layer in enumerate(decoder.layers):
            queries = layer(
                queries,
                position_embeddings=decoder.query_pos_head(points).clamp(min=-10, max=10),
                reference_points=points[:, :, None],
                spatial_shapes_list=sizes,
                encoder_hidden_states=memory,
            )
            if number == 0:
                first = (decoder.pre_bbox_head(queries) + logit(points)).sigmoid()
                sides = sides_twice(first)
                corners = decoder.bbox_embed[0](queries)
            else:
                corners = decoder.bbox_embed[number](queries + before) + corners
            shares = corners.unflatten(2, (4, bins)).softmax(3)
            points = first + F.linear(shares.flatten(2), shifts) * sides
            before = queries
        quality = decoder.lqe_layers[-1]
        likely = shares.topk(quality.top_prob_values).values
        return points, decoder.class_embed[-1](queries) + sureness(quality, likely)


def _loss_of(network: Any) -> Any:
    """The network's own loss, by our matcher."""
    # not above: transformers takes seconds
    from transformers.loss.loss_d_fine import DFineLoss

    class Loss(DFineLoss):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.matcher = Matcher(
                of_class=config.matcher_class_cost,
                of_box=config.matcher_bbox_cost,
                of_overlap=config.matcher_giou_cost,
            )

    return with_names(network.loss_function, DFineLoss=Loss)


# shifts of left, top, right and bottom edges → of the middle's x and y, of width and height
EDGES = [[-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5], [1, 0, 1, 0], [0, 1, 0, 1]]


def weights_of_bins(bins: int, up: Tensor, scale: Tensor) -> Tensor:
    """How far each bin shifts an edge, [bins + 1]: finely near zero, and far at both ends.

    Source: Peng et al., section 4.1.
    """
    far = up.abs() * scale.abs()
    powers = (far + 1) ** (2 / (bins - 2))
    steps = torch.cat([powers**i - 1 for i in range(1, bins // 2)])
    return torch.cat([-2 * far, -steps.flip(0), torch.zeros_like(far), steps, 2 * far])


def logit(shares: Tensor) -> Tensor:
    """The inverse of the sigmoid, of numbers that are not quite 0 or 1."""
    return (shares.clamp(min=1e-5) / (1 - shares).clamp(min=1e-5)).log()


def sureness(quality: Any, likely_NQ4k: Tensor) -> Tensor:
    """What the shares of the likeliest bins say of a box, [N, Q, 1].

    Hugging Face's layer reads their mean, too, which is a part of its first product here.
    """
    first, *others = quality.reg_conf.layers
    count = likely_NQ4k.shape[3]
    weight = first.weight.unflatten(1, (4, count + 1))
    weight = (weight[..., :count] + weight[..., count:] / count).flatten(1)
    told = F.linear(likely_NQ4k.flatten(2), weight, first.bias)
    for layer in others:
        told = layer(quality.reg_conf.act(told))
    return told


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
        seen = looking()(
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


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network with fresh weights, or with those learned from COCO, the classes' aside.

    Raises:
        UsageError: transformers is not installed, sides that are no multiples of ``STEP``, or
            pretrained weights that cannot be had.
    """
    name, channels, height, width = record.name, record.channels, record.height, record.width
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
        num_labels=record.classes,
        num_queries=min(QUERIES, places),
        freeze_backbone_batch_norms=False,  # nothing normalizes a network that starts from nothing
        tie_word_embeddings=False,  # each layer has heads of its own, as published
        attn_implementation={"": "sdpa", "backbone_config": "eager"},
        **DETECTORS[name],
    )
    if not pretrained:
        return DFine(hub.DFineForObjectDetection(config))
    network = published(hub.DFineForObjectDetection, config, (name, PUBLISHED[name]), channels)
    fold_normalization(network.model.backbone.model.embedder.stem1)
    return DFine(network)


def _multiple(side: int) -> int:
    return max(STEP, round(side / STEP) * STEP)


def fold_normalization(stem: Any) -> None:
    """Make a first layer that learned pixels from 0 to 1 say the same of ImageNet's normalized.

    Exact but for the border, where padding is zero before and after.
    """
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    with torch.no_grad():
        stem.normalization.running_mean -= (stem.convolution.weight.sum((2, 3)) * mean).sum(1)
        stem.convolution.weight *= std.view(1, 3, 1, 1)
