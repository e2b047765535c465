"""What a memory says of itself and answers, sent to the tool where a team looks at its trainings."""

from .contents import bytes_by_kind, contents
from .mlflow import mlflow
from .tensorboard import tensorboard
from .trackio import trackio
from .wandb import wandb

__all__ = ["bytes_by_kind", "contents", "mlflow", "tensorboard", "trackio", "wandb"]
