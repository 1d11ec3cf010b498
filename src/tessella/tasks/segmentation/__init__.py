"""A class for each pixel of a picture."""

TITLE = "a class for each pixel"
SCORE = "miou"
