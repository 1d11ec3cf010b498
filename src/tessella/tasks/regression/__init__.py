"""One or several numbers for each picture."""

TITLE = "numbers for each picture"
SCORE = "r2"
