"""Runs one model over the GPUs of a machine, a process each: heads and columns are cut, partial results added up.

cut.py says who has what of a skeleton; group.py adds up, in one of the ways of collectives.py; ranks.py starts the
processes beside the driver, which gets the scheduler's steps, computes what is not cut, and tells the others each step
before it runs it.
"""
