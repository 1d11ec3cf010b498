"""The place of each picture in an order, of which a network learns which of two comes first."""

TITLE = "the place of each picture in an order"
SCORE = "concordance"
