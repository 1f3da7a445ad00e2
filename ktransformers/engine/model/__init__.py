"""What was opened: the config, the skeleton on meta, its checks, its card and fingerprint."""
