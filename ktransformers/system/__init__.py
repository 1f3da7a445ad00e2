"""The machine and the process as the operating system describes them. Knows no model and imports nothing heavy.

`cores.py` says how many threads compute, by affinity and CPU quotas; `process_group.py` starts, watches and ends child
processes, whose first steps are in `child.py`; `restart_policy.py` says whether one that died is replaced, and
`restarts.py` tries until one is ready; `private_folder.py` and `user_files.py` are folders that one user alone may
enter; `logs.py` what is logged; `file_kinds.py` what a wrong file is, by its first bytes; `shipped_rules.py` where the
rule files lie.
"""
