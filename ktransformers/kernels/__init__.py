"""Kernels: native ones of the CPU, Triton ones of a GPU, and a slow torch oracle of each.

    extension               loads the native extension; nobody else imports it
    types                   nouns: weights, block formats, steps of states
    blocks                  decodes ggml's blocks
    reference, reference_recurrent   the oracles
    cpu                     checks, then one native call
    triton                  common, quant, linear, then experts, attention, recurrent
    transfer, flashinfer    what orders work between CPU and GPU; the only module that imports FlashInfer

This package knows tensors, block formats and threads. It does not know models, rules, caches' owners or files.
"""
