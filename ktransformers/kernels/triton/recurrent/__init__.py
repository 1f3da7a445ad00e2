"""Recurrent mixers: scans in chunks and by token, convolutions and their states."""
