"""What predictions need of a machine, measured in seconds: `doctor` and `plan` use it."""
