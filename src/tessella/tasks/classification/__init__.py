"""One class of several for each picture."""

TITLE = "one class for each picture"
SCORE = "accuracy"
