"""What programs around the server need of it."""
