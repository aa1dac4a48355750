"""Small scripts of TRL, and the projects that `rloo init --from-trl` makes of scripts."""

from pathlib import Path

import yaml
from helpers import printed

from rloo_pipeline.commands.init import init_from_trl
from rloo_pipeline.config.loading import load

SMALL = """
from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer
COMMON = dict(temperature=0.7)
def length(completions, **kwargs): return [float(len(text)) for text in completions]
RLOOTrainer("org/model", length, RLOOConfig("out", {options}), load_dataset("org/data", split="train"),
    load_dataset("org/data", "main", split="test")).train()
"""
GRPO = SMALL.replace("RLOO", "GRPO")


def project(script: str, options: str = "", folder: str = "project") -> tuple[dict, str]:
    """The configuration of a script's project, which is valid, and what is printed."""
    Path("script.py").write_text(script)
    output = printed(init_from_trl, Path(folder), f"script.py {options}", None, False)
    file = Path(folder, "config", "config.yaml")
    load(file)
    return yaml.safe_load(file.read_text()), output
