"""The room of annotations: files of others that say where things are in pictures.

COCO, YOLO, Pascal VOC and KITTI are read into one record (``record``), with everything that is
wrong listed beside its file (``check``); COCO is written again. Masks are polygons or run lengths
(``rle``). A file may be a stranger's: its size, its depth and what it counts are bounded before
memory is taken.
"""

from tessella.annotations.opening import is_annotated, read_annotations

__all__ = ["is_annotated", "read_annotations"]
