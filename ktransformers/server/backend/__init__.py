"""What answers requests: one interface (`base`), one module per backend."""
