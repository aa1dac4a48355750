"""What cannot be used together with images in prompts (`dataset.image_column`)."""

from __future__ import annotations

from rloo_pipeline.config.section import JSON


def check(config: JSON) -> None:
    """Checks the keys of a whole configuration.

    Raises:
        ValueError: one does not go with images, or `model.train_vision` is set without them.
    """
    if config["dataset"]["image_column"] is None:
        if config["model"]["train_vision"]:
            raise ValueError("model.train_vision: there are no images to train on; set dataset.image_column")
        return
    if config["model"]["train_vision"] and config["deepspeed"]["processes"] > 1:
        raise ValueError("model.train_vision cannot be used with several processes yet; set deepspeed.processes: 1")
    rollout, name = config["rollout"], "dataset.image_column"
    refused = {
        "rollout.tools": rollout["tools"],
        "rollout.environment": rollout["environment"],
        "warmstart.sft": config["warmstart"]["sft"],
        "evaluation.harness": config["evaluation"]["harness"],
        "update.lora": config["update"]["lora"],
        "model.quantization": config["model"]["quantization"],
        "deepspeed.zero_stage: 3": config["deepspeed"]["zero_stage"] == 3,
    }
    for key, value in refused.items():
        if value:
            raise ValueError(f"{key} cannot be used with images yet ({name}); leave one of the two out")
