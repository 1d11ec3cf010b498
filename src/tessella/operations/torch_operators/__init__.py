"""Operators of torch without a row of their own: which may run, and with which arguments."""
