"""`ktransformers serve` and `stage`: one model, several models, a cluster, a stage of a pipeline."""
