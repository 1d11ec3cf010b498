"""The masks of a large picture, of what a network tells of its tiles: joined as detection's boxes.

Of a thing that an edge cuts in both tiles, the mask is what either shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessella.annotations import rle
from tessella.core.tiles import Tiles
from tessella.tasks.detection.tiles import Piece, merged, pieces_of, told_of
from tessella.tasks.instances.answers import answer
from tessella.tasks.task import Query, TileOutputs
from tessella.tasks.view import View


def joined(
    outputs: TileOutputs, tiles: Tiles, size: tuple[int, int], view: View,
    about: tuple[Any, ...], query: Query,
) -> Any:  # fmt: skip
    """The answer to a picture of this height and width, as ``answers.answer`` gives it."""
    height, width = size
    places = tiles.places(height, width)
    kept = merged(pieces_of(outputs, tiles, size, view, about, query, answer))
    answers = []
    for thing in kept[: query.top]:
        counts = [_placed(piece, places[piece.tile], size) for piece in thing.pieces]
        mask = {"size": [height, width], "counts": rle.compressed(_union(counts)).decode()}
        answers.append(told_of(thing) | {"box": thing.box(), "mask": mask})
    return answers


def _placed(one: Piece, place: tuple[int, int], size: tuple[int, int]) -> rle.Counts:
    """The run lengths of a tile's mask in the whole picture."""
    rows, _ = one.told["mask"]["size"]
    top, left = place
    counts = rle.expanded(one.told["mask"]["counts"].encode())
    return rle.seen_in(counts, rows, (-top, -left, *size))


def _union(masks: list[rle.Counts]) -> rle.Counts:
    """The run lengths of what any of some masks of one size shows."""
    pixels = int(masks[0].sum())
    ends = [np.cumsum(counts) for counts in masks]
    begins = np.concatenate([e[:-1:2] for e in ends])
    stops = np.concatenate([e[1::2] for e in ends])
    order = np.argsort(begins, kind="stable")
    begins, stops = begins[order], np.maximum.accumulate(stops[order])
    # a run that begins inside of those before it is part of them
    begins = np.maximum(begins, np.concatenate([[0], stops[:-1]])) if len(begins) else begins
    return rle.of_runs(begins, stops, pixels)
