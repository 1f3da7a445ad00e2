"""Several models at one address: which of them run, and how requests find theirs.

pool.py decides and knows no HTTP, no tasks and no time but what it is given; model_manager.py does what it decides;
gateway.py passes each request to the app of its model; serving.py starts and ends all of it.
"""
