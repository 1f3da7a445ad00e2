"""The processes of one model: who starts them, when they synchronize, and which messages they get.

parallel_strategy.py says what each has (tensor_parallel/, pipeline/), ranks.py is what the builder calls where
processes meet, worker.py the process beside the driver, which gets each step (messages.py) from it.
"""
