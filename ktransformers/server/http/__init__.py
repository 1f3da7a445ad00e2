"""What requests have in common below any route: paths, hosts, keys, fields, limits of JSON, threads for texts."""
