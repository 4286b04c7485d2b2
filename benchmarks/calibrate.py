"""How far the clock of `benchmarks/tpu.py` is off: known work, and trainings with published times.

    python benchmarks/calibrate.py --clones=peers

Known work: the time that its products, bytes or elementwise operations take at the peak. The
bounds are data sheets'; nothing is timed. Published: images per second of a whole training, with
its input, evaluations and checkpoints, which the clock leaves out.
"""
