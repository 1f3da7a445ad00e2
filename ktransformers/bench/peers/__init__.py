"""Other programs that are measured in the same run, each in a child process that answers questions."""
