"""The machine and the process as the operating system describes them. Knows no model and imports nothing heavy."""
