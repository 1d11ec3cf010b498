"""Readings of GPUs and host, as records and as text for Prometheus."""
