"""RF-DETR N, S and M: Hugging Face's networks, which answer as our other detectors do.

Robinson et al., RF-DETR: neural architecture search for real-time detection transformers,
arXiv:2511.09554. A vision transformer with windows, and queries that look at a few points of one
map. In training thirteen groups of queries learn the same picture, of which one is kept.
"""

from __future__ import annotations

import math
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
    exporting,
    looking,
    pixels,
    published,
    require_transformers,
    things_of,
)
from tessella.nn.zoo.matching import Matcher, with_names

QUERIES = 300
PATCH, WINDOWS = 16, 2
STEP = PATCH * WINDOWS  # height and width are multiples of it, and the same
START, BORDER = 0.05, 0.01  # sides of a first box, and where none begins, in fractions
SPREAD = 0.5  # of a box: where a point of offset 1 lies

SIDES_TWICE = [[0.0, 0, 1, 0], [0, 0, 0, 1]] * 2  # of middle and sides

# By name: the side of the pictures that the published weights learned, and layers of the decoder.
SIDES = {"rf_detr_n": 384, "rf_detr_s": 512, "rf_detr_m": 576}
DETECTORS: dict[str, dict[str, Any]] = {
    "rf_detr_n": {"decoder_layers": 2},
    "rf_detr_s": {"decoder_layers": 3},
    "rf_detr_m": {"decoder_layers": 4},
}
BACKBONE: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "out_indices": [3, 6, 9, 12],
}
PUBLISHED = {
    "rf_detr_n": "Roboflow/rf-detr-nano",
    "rf_detr_s": "Roboflow/rf-detr-small",
    "rf_detr_m": "Roboflow/rf-detr-medium",
}


class RfDetr(nn.Module):
    """The network: ``[N, channels, H, W]`` to boxes ``[N, Q, 4 + classes]``, or to its loss.

    Args:
        network: an ``RfDetrForObjectDetection``, which becomes part of this.
        size: height and width of its inputs.
    """

    _proposals: Tensor
    _inside: Tensor
    _turns: Tensor
    _phases: Tensor

    def __init__(self, network: Any, size: tuple[int, int]) -> None:
        super().__init__()
        for layer in network.model.decoder.layers:
            layer.cross_attn = Attention(layer.cross_attn)
        place_once(network.model.backbone.backbone.embeddings, size)
        network.loss_function = with_names(network.loss_function, LwDetrHungarianMatcher=_matcher)
        self.network = network
        proposals, inside = places_of(size)
        self._all_inside = bool(inside.all())
        self._rows, self._columns = (length // PATCH for length in size)
        turns, phases = waves(network.config.d_model // 2)
        for name, constant in (
            ("_proposals", proposals * inside),
            ("_inside", inside.float()),
            ("_turns", turns),
            ("_phases", phases),
        ):
            self.register_buffer(name, constant, persistent=False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Boxes; in training [loss, mean overlap] of targets [N, M, 6] (``tasks.detection``).

        The overlap is the generalized one of boxes that learn a thing, of the last layer.
        """
        if targets is None:
            return boxes_and_scores(*self._found(images))
        things = [things_of(of) for of in targets]
        made = self.network(images, labels=things)
        known = float(any(len(of["class_labels"]) for of in things))
        overlap = (1 - made.loss_dict["loss_giou"].detach()).clamp(min=0) * known
        return torch.stack([made.loss.float(), overlap.float()])

    def _found(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes [N, Q, 4] of middle and sides, and logits [N, Q, classes].

        As Hugging Face's forward pass answers, without what only its loss reads: boxes of the
        places that no query starts from, and the answers of all layers but the last.
        """
        model = self.network.model
        map = self._map(images)
        memory = pixels(map)
        told = memory if self._all_inside else memory * self._inside
        told = model.enc_output_norm[0](model.enc_output[0](told))
        scores = model.enc_out_class_embed[0](told).amax(2)
        if not self._all_inside:
            scores = scores.masked_fill(self._inside[:, 0] == 0, -torch.inf)
        places = best_places(scores, self.network.config.num_queries)
        told = at(told, places)
        starts = at(self._proposals.expand(len(images), -1, -1), places)
        points = moved(starts, model.enc_out_bbox_embed[0](told))
        points = moved(points, model.reference_point_embed.weight[: places.shape[1]])
        queries = model.query_feat.weight[: places.shape[1]].expand(len(images), -1, -1)
        decoder = model.decoder
        positions = self._positions(points)
        for layer in decoder.layers:
            queries = layer(
                queries,
                position_embeddings=positions,
                reference_points=points[:, :, None],
                spatial_shapes_list=[(map.shape[2], map.shape[3])],
                encoder_hidden_states=memory,
            )
        queries = decoder.layernorm(queries)
        return moved(points, self.network.bbox_embed(queries)), self.network.class_embed(queries)

    def _map(self, images: Tensor) -> Tensor:
        """The one map at which queries look, [N, channels, rows, columns].

        As Hugging Face's backbone and projector make it, in fewer steps: patches are cut out as
        windows want them, the places of the first token are added to it once, and the tokens of
        four layers are normalized and mixed together before they become a map.
        """
        encoder = self.network.model.backbone
        backbone, embeddings = encoder.backbone, encoder.backbone.embeddings
        first, places = embeddings.position_embeddings.split([1, self._rows * self._columns], 1)
        rows, columns = self._rows // WINDOWS, self._columns // WINDOWS
        cut = torch.unflatten(images, 3, (WINDOWS, columns, PATCH))
        cut = torch.unflatten(cut, 2, (WINDOWS, rows, PATCH))
        cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).flatten(5).flatten(3, 4).flatten(1, 2)
        projection = embeddings.patch_embeddings.projection
        places = places.reshape(WINDOWS, rows, WINDOWS, columns, -1).transpose(1, 2)
        told = F.linear(
            cut.to(projection.weight.dtype), projection.weight.flatten(1), projection.bias
        )
        told = (told + places.reshape(1, WINDOWS**2, rows * columns, -1)).flatten(0, 1)
        first = (first + embeddings.cls_token).expand(len(told), -1, -1)
        told, kept = torch.cat([first, told], 1), []
        for number, layer in enumerate(backbone.encoder.layer, 1):
            told = layer(told)
            if number in backbone.config.out_indices:
                kept.append(told)
        told = torch.unflatten(torch.cat(kept, 2), 2, (len(kept), -1))
        told = backbone.layernorm(told).flatten(2)
        mixing = encoder.projector.projector_layer
        told = F.linear(told, mixing.conv1.conv.weight.flatten(1))
        told = mixing.conv1.activation(F.layer_norm(told, *_norm(mixing.conv1.norm)))[:, 1:]
        told = torch.unflatten(told, 1, (rows, columns))
        told = torch.unflatten(told, 0, (-1, WINDOWS, WINDOWS))
        map = told.transpose(2, 3).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)
        parts = list(torch.split(map, mixing.hidden_channels, 1))
        for block in mixing.bottlenecks:
            parts.append(block(parts[-1]))
        made: Tensor = encoder.projector.layer_norm(mixing.conv2(torch.cat(parts, 1)))
        return made

    def _positions(self, points_NQ4: Tensor) -> Tensor:
        """What the decoder's queries are told of their boxes: waves of x, y, width and height.

        Cosines are sines a quarter further on. Hugging Face's waves of y stand before those of x;
        here the weights that read them change places.
        """
        first, *others = self.network.model.decoder.ref_point_head.layers
        waves = (points_NQ4[..., None] * self._turns + self._phases).sin().flatten(2)
        y, x, *sides = first.weight.unflatten(1, (4, -1)).unbind(1)
        told = F.linear(waves, torch.cat([x, y, *sides], 1), first.bias)
        for layer in others:
            told = layer(told.relu())
        return told


def _matcher(class_cost: float, bbox_cost: float, giou_cost: float) -> Matcher:
    return Matcher(of_class=class_cost, of_box=bbox_cost, of_overlap=giou_cost)


def _norm(norm: nn.LayerNorm) -> tuple[Any, ...]:
    """What ``layer_norm`` is told of a norm whose module moves the channels to their place."""
    return norm.normalized_shape, norm.weight, norm.bias, norm.eps


def moved(boxes: Tensor, shifts: Tensor) -> Tensor:
    """Boxes of middle and sides, moved by parts of their sides and scaled by exponentials.

    Written down, it is a product that repeats the sides and one pass over all four numbers.
    """
    if exporting():
        middle = boxes.new_tensor([1.0, 1.0, 0.0, 0.0])
        by = (shifts * (1 - middle)).exp() - middle + shifts * middle  # exp(0) - 1 is 0
        return boxes * middle + by * F.linear(boxes, boxes.new_tensor(SIDES_TWICE))
    middle, sides = boxes[..., :2], boxes[..., 2:]
    by, times = shifts[..., :2], shifts[..., 2:]
    return torch.cat([by * sides + middle, times.exp() * sides], -1)


def places_of(size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A box around each patch, [P, 4] of middle and sides, and whether it is asked about, [P, 1]:
    not at the very border of a large picture.
    """
    rows, columns = (length // PATCH for length in size)
    y = (torch.arange(rows) + 0.5) / rows
    x = (torch.arange(columns) + 0.5) / columns
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), 2).flatten(0, 1)
    return torch.cat([grid, torch.full_like(grid, START)], 1), (
        ((grid > BORDER) & (grid < 1 - BORDER)).all(1, keepdim=True)
    )


def waves(count: int) -> tuple[Tensor, Tensor]:
    """How far a number from 0 to 1 turns each wave, and where it begins, [count] each."""
    slower = 10_000.0 ** (2 * torch.div(torch.arange(count), 2, rounding_mode="floor") / count)
    return 2 * math.pi / slower, torch.arange(count) % 2 * (math.pi / 2)


class Attention(nn.Module):
    """Deformable attention as one operation; its weights are called as Hugging Face's.

    No picture is padded, so that no pixel has to be left out.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.sampling_offsets = theirs.sampling_offsets
        self.attention_weights = theirs.attention_weights
        self.value_proj, self.output_proj = theirs.value_proj, theirs.output_proj
        self.heads, self.points = int(theirs.n_heads), int(theirs.n_points)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        encoder_hidden_states: Tensor,
        position_embeddings: Tensor,
        reference_points: Tensor,
        spatial_shapes_list: list[tuple[int, int]],
        **_: object,
    ) -> tuple[Tensor, None]:
        asked = hidden_states + position_embeddings
        sizes = tuple(side for size in spatial_shapes_list for side in size)
        seen = looking()(
            self.value_proj(encoder_hidden_states),
            reference_points[:, :, 0],
            self.sampling_offsets(asked),
            self.attention_weights(asked),
            heads=self.heads,
            sizes=sizes,
            points=(self.points,) * len(spatial_shapes_list),
            spread=SPREAD,
        )
        return self.output_proj(seen), None


def place_once(embeddings: Any, size: tuple[int, int]) -> None:
    """Bring the places of patches, a square of any size, to those of pictures of ``size``.

    Hugging Face's does so in each run.
    """
    known = embeddings.position_embeddings.detach()
    first, patches = known[:, :1], known[:, 1:]
    side, depth = round(patches.shape[1] ** 0.5), known.shape[2]
    rows, columns = (length // PATCH for length in size)
    if (rows, columns) != (side, side):
        patches = patches.reshape(1, side, side, depth).permute(0, 3, 1, 2)
        patches = F.interpolate(
            patches, (rows, columns), mode="bicubic", align_corners=False, antialias=True
        )
        patches = patches.permute(0, 2, 3, 1).reshape(1, -1, depth)
        embeddings.position_embeddings = nn.Parameter(torch.cat([first, patches], 1))
    embeddings.interpolate_pos_encoding = _Placed(embeddings)


class _Placed:
    """The places of patches as they are; it can be copied with its network."""

    def __init__(self, embeddings: Any) -> None:
        self._embeddings = embeddings

    def __call__(self, patches: Tensor, height: int, width: int) -> Tensor:
        places: Tensor = self._embeddings.position_embeddings
        return places


def build(record: Network, *, pretrained: bool) -> nn.Module:
    """The network with fresh weights, or with those learned from COCO, the classes' aside.

    Raises:
        UsageError: transformers is not installed or has no RF-DETR, sides that are not the same or
            no multiples of ``STEP``, or pretrained weights that cannot be had.
    """
    name, channels, height, width = record.name, record.channels, record.height, record.width
    if height != width or height % STEP:
        side = max(STEP, round(max(height, width) / STEP) * STEP)
        raise UsageError(
            f"height and width of {name} are the same, and multiples of {STEP}",
            seen=f"{height}×{width}",
            fix=f"import the pictures at {side}×{side}",
        )
    hub = require_transformers("RF-DETR")
    if not hasattr(hub, "RfDetrForObjectDetection"):
        raise UsageError(
            "this version of transformers has no RF-DETR",
            seen=hub.__version__,
            fix="pip install --upgrade transformers",
        )
    backbone = hub.RfDetrDinov2Config(
        **BACKBONE, num_channels=channels, image_size=SIDES[name] if pretrained else height,
        patch_size=PATCH, num_windows=WINDOWS, use_mask_token=False,
    )  # fmt: skip
    config = hub.RfDetrConfig(
        backbone_config=backbone,
        num_labels=record.classes,
        num_queries=min(QUERIES, (height // PATCH) * (width // PATCH)),
        decoder_n_points=2,
        dropout=0.0,  # as its authors train it; Hugging Face's own is 0.1
        attn_implementation="sdpa",
        **DETECTORS[name],
    )
    kind = hub.RfDetrForObjectDetection
    made = (
        published(kind, config, (name, PUBLISHED[name]), channels) if pretrained else kind(config)
    )
    return RfDetr(made, (height, width))
