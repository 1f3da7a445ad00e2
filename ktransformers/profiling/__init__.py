"""Where the time of a step goes. runtime.py turns the records of native kernels on and off."""
