"""Networks as torch modules: the zoo that ``Network`` records name, Caffe's text, layers over our
kernels, layer views.
"""

from tessella.nn.layers import convert

__all__ = ["convert"]
