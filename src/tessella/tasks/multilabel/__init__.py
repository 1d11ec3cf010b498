"""Any number of classes for each picture, none included."""

TITLE = "any number of classes for each picture"
SCORE = "map"
