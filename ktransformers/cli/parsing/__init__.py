"""What a command line means, and what its end says."""
