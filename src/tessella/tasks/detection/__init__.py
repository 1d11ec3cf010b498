"""The things in a picture: a box, a class and a score for each."""

TITLE = "boxes of the things in a picture"
SCORE = "map"
