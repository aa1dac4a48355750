"""Checks of policy 0 and symptoms of a run: functions from measurements to a verdict, and the limits beside them.

Everything here is pure: it reads no files and imports no other part of the package. The configuration takes names and
defaults of all limits from here (`config/check_limits.py`, `config/gates.py`). `registry` defines a check and a
symptom; `evidence` and `history` are what they take.
"""
