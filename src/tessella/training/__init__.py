"""Training: a dataset and a recipe become a run with checkpoints.

``loop.train`` is the way in. The engine never imports the compiler or the runtime.
"""
