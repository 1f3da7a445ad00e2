"""Load of agents on servers: shapes of the load, the clients that send it, and its figures."""
