"""Runs one model in several processes: what they share (`ranks`), and the two ways to divide it.

`tensor_parallel` gives each process a part of every layer, `pipeline` gives it neighbouring layers. The process that
samples is the engine as without: it gets the scheduler's steps and tells the others of each before it runs it. What
stands for modules that other processes have is a `Placeholder` (operators/partial_sums.py), which no rule is for.
"""
