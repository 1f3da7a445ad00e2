"""One model over several processes: who starts them, when they meet, and what they are told.

parallel_strategy.py says what each has (tensor_parallel/, pipeline/), ranks.py is what the builder calls where
processes meet, worker.py the process beside the driver, which gets each step (messages.py) from it.
"""
