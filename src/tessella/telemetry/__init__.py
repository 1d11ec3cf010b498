"""What the GPUs and the host are doing: readings as records, and as text for Prometheus."""
