"""Notes that an image file was replaced under its name since a run began. Snakemake sees only the name.

Images that are not files (`docker://…`, sandbox folders) are known by their names only.
"""

from pathlib import Path

from snakemake.logging import logger

from rloo_pipeline.artifacts.files import read_json, write_json
from rloo_pipeline.cluster import containers
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

RECORD = Path("logs/image.json")
"""File of a run with the name and the identity of the image with which it began."""


def note(call: SnakemakeCall) -> None:
    """Warns if jobs will use a different image file of the same name than the one recorded for their run, and records
    the image of a run that begins or has no record. With an image of another name, everything runs again.
    """
    if not call.in_image:
        return
    now = {"image": call.image, "identity": containers.identity(call.image)}
    outputs = call.outputs()
    replaced = []
    for assets in call.assets():
        record = assets.parent / RECORD
        begins = str(assets) in outputs or not record.exists()
        before = now if begins else read_json(record)
        if begins or before["image"] != now["image"]:
            write_json(record, now)
        elif before["identity"] != now["identity"]:
            replaced.append(record)
    if replaced:
        logger.warning(
            f"{call.image} was built again or replaced since the first call that recorded it in {replaced[0]}, and "
            "nothing runs again for it: put the old image back, or give the run another name, unless the two are meant "
            "to be mixed"
        )
