"""The Bradley–Terry loss of a reward model (arXiv 2009.01325, equation 1), as in TRL's RewardTrainer.

For a pair with rewards r_c of the chosen and r_r of the rejected completion, and a margin m (arXiv 2307.09288,
equation 2):

    −log σ(r_c − r_r − m)
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    margins: Float[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """The loss of each pair."""
    return -logsigmoid(chosen - rejected - margins)
