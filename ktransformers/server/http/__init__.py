"""Common handling of requests below any route: paths, hosts, keys, fields, limits of JSON, threads for texts."""
