"""What the GPUs and the host are doing: readings as records, and as text for Prometheus; how the
GPUs are linked, and the least time of an exchange over the links.
"""
