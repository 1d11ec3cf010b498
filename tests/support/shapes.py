"""Pictures of filled shapes with their masks, as COCO's JSON: discs as run lengths, triangles as
outlines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

NAMES = ("disc", "triangle")


def write_shapes(
    folder: Path,
    name: str,
    *,
    count: int,
    size: tuple[int, int],
    sides: tuple[int, int],
    most: int = 2,
    seed: int = 0,
) -> Path:
    """Write pictures of a height and width and ``name.json``; things do not touch each other."""
    rng = np.random.default_rng(seed)
    height, width = size
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    things: list[dict[str, Any]] = []
    for number in range(count):
        pixels = rng.integers(0, 90, (height, width, 3)).astype(np.uint8)
        taken = np.zeros((height, width), np.uint8)
        for _ in range(int(rng.integers(1, most + 1))):
            side, label = int(rng.integers(sides[0], sides[1] + 1)), int(rng.integers(2))
            for _ in range(20):
                x, y = int(rng.integers(0, width - side)), int(rng.integers(0, height - side))
                if not taken[y : y + side, x : x + side].any():
                    break
            else:
                continue
            taken[y : y + side, x : x + side] = 1
            outline = [x, y + side, x + side / 2, y, x + side, y + side]
            if label == 0:
                mask = np.zeros((height, width), np.uint8)
                middle = ((2 * x + side) // 2, (2 * y + side) // 2)
                cv2.circle(mask, middle, side // 2, 1, cv2.FILLED)
                rle = coco_mask.encode(np.asfortranarray(mask))
                shape: Any = {"size": [height, width], "counts": rle["counts"].decode()}
            else:
                rle = coco_mask.frPyObjects([outline], height, width)[0]
                shape = [[float(v) for v in outline]]
            mask = coco_mask.decode(rle)
            pixels[mask > 0] = np.array([(220, 60, 60), (60, 90, 230)][label])
            pixels[mask > 0] += rng.integers(0, 20, (int(mask.sum()), 3)).astype(np.uint8)
            things.append({
                "id": len(things) + 1, "image_id": number, "category_id": label,
                "bbox": [float(v) for v in coco_mask.toBbox(rle)],
                "area": float(coco_mask.area(rle)), "iscrowd": 0, "segmentation": shape,
            })  # fmt: skip
        file = f"images/{name}-{number:03d}.png"
        Image.fromarray(pixels).save(folder / file)
        images.append({"id": number, "file_name": file, "height": height, "width": width})
    categories = [{"id": k, "name": label} for k, label in enumerate(NAMES)]
    plain = {"images": images, "annotations": things, "categories": categories}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(plain))
    return path
