"""Finds and downloads models: what a user calls one, and the files that this means.

`names.py` reads names, `locate.py` is where every command asks; `cache.py` is the Hugging Face cache, `remote.py`,
`headers.py` and `download.py` fetch, resume and check, `variants.py` and `choice.py` find the quantization that fits.
Does not know how a model runs.
"""
