"""Experts in files, from which they are read one by one while a model runs.

    records.py   the record of one expert, the same in a file and in memory
    header.py    the header of a packed file: layers, checksums, and of which model
    writing.py   writes a packed file, atomically
    reading.py   opens and checks one
    places.py    where it is
    mapped.py    a model's own files as the place of its experts, where these are blocks that kernels read or pack

Does not know how experts are packed (operators/linear/packed.py) or computed.
"""
