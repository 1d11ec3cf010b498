"""Attacks with made-up input, by the ten thousand: ``python -m tests.attack --help``."""
