"""A transformer layer with a loss."""

from torch import Tensor, nn


class Block(nn.Module):
    """A transformer layer, and the mean square of its results as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()
