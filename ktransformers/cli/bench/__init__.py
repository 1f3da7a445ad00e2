"""`ktransformers bench ...`: a command line for each measurement."""
