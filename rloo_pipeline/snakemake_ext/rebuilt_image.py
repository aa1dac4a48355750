"""Notes that an image was rebuilt under its name since a run began. Snakemake sees the name and not what is in it."""

from pathlib import Path

from snakemake.logging import logger

from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.cluster import containers
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

RECORD = Path("logs/image.json")
"""File of a run with the name and the identity of the image with which it began."""


def note(call: SnakemakeCall) -> None:
    """Warns if jobs will use a different image of the same name than the first jobs of their run, and records the image
    of a run that begins. With an image of another name, everything runs again.
    """
    if not call.in_image:
        return
    now = {"image": call.image, "identity": containers.identity(call.image)}
    outputs = call.outputs()
    for run in call.runs.by_folder:
        folder = call.run_folder(run)
        begins = str(folder / "assets") in outputs or not (folder / RECORD).exists()
        before = now if begins else read_json(folder / RECORD)
        if begins or before["image"] != now["image"]:
            write_json(folder / RECORD, now)
        elif before["identity"] != now["identity"]:
            logger.warning(
                f"{call.image} was built again or replaced since {folder} began, and nothing runs again for it: put "
                "the old image back, or give the run another name, unless the two are meant to be mixed"
            )
