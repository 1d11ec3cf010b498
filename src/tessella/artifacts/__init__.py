"""The file formats that pass between the engines: dataset, run, checkpoint, plan.

Versioned, written atomically, hash-checked, without pickle. A reader either returns exactly what a
writer wrote or raises an ``ArtifactError``.
"""
