"""The machine and the process as the operating system describes them. Knows no model and imports nothing heavy.

`cores.py` says how many threads compute, by affinity and CPU quotas; `child.py` starts processes that end with their
parent; `private_folder.py` and `user_files.py` are folders that one user alone may enter; `logs.py` what is logged;
`restart_policy.py` whether a process that died is replaced; `file_kinds.py` what a wrong file is, by its first bytes;
`shipped_rules.py` where the rule files lie.
"""
