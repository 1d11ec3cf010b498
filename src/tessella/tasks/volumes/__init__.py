"""A class for each voxel of a volume."""

TITLE = "a class for each voxel of a volume"
SCORE = "dice"
VOLUMES = True
