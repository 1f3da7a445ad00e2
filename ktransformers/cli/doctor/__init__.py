"""`ktransformers doctor`: what this machine has, what is installed, and how fast it will be."""
