"""Opens a model without its weights: the config, the skeleton on meta, its checks, its card and fingerprint.

`opened.py` opens files and config; `skeleton.py` builds the model on meta, whose class `text_models.py` chooses and
whose recurrent layers `file_layouts.py` arranges as a GGUF has them; `config_checks.py` and `checks.py` refuse what
cannot run; `card.py` is what interfaces show of it, `fingerprint.py` what its tokens depend on, in two parts: the
model, and the way in which it is computed. A session of the same model that was computed otherwise is still good for
its tokens.
"""
