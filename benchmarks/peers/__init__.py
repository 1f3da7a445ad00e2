"""Other programs that are measured beside ours, each in a child process."""
