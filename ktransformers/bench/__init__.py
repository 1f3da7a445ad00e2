"""Measuring: what this machine, its kernels, whole models and servers do, beside limits and peers. No command line."""
