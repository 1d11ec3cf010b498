"""Networks as torch modules: the zoo that ``Network`` records name, Caffe's text, layer views."""
