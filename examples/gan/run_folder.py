"""The files of a run of this example in the output folder."""

from common.run_folder import RunFolder
from record import Step, save_grid


class GanRunFolder(RunFolder):
    """
    A run's files, with the digits drawn after each epoch, and the LeNet that judges those of the last one.

    Args:
        args (argparse.Namespace): The options.
        fingerprint (str): Of the data.
    """

    def __init__(self, args, fingerprint):
        settings = ("loss", "filters", "latent", "update", "n_critic", "separate_scales")
        super().__init__(args, "gan.ckpt", Step, settings, fingerprint)
        # It goes with the data, and not with the run.
        self.judge = self.folder / "judge.ckpt"

    def files(self):
        return [*super().files(), *self.folder.glob("epoch-*.png")]

    def save(self, cell, epoch, steps, images):
        save_grid(self.folder / f"epoch-{epoch:03}.png", images)
        super().save(cell, epoch, steps)
