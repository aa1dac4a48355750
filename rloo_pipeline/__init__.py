"""RLOO post-training of language models as a DAG of file-to-file stages.

Importing this package imports neither torch nor vllm nor deepspeed.
"""

__version__ = "0.1.0"
