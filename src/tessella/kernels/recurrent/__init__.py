"""Recurrent layers: a whole sequence in one step."""
