"""2:4 sparse weights: linear layers and 1×1 convolutions that skip half of the products."""
