"""What runs inside the sandboxes of `code_reward`: the standard library alone, Python 3.9 or newer.

`sandbox.py` sends the source of these modules along, so that nothing of this package need be readable in there.
"""
