"""The things in a picture: a box, a class, a score and a mask for each."""

TITLE = "boxes and masks of the things in a picture"
SCORE = "map"
