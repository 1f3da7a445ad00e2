"""What a rule can inject: one file per role. See `base.Operator` for the contract."""
