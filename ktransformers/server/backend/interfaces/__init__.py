"""The backends: one module for each kind, and the one that starts and stops another on demand."""
