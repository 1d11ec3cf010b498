"""Readings of GPUs and host, as records and as text for Prometheus; links between GPUs, and the
least time of an exchange over the links.
"""
