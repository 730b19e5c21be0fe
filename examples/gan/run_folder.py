"""The files of a run of this example in the output folder."""

from common.run_folder import RunFolder
from record import Step, save_grid


class GanRunFolder(RunFolder):
    """
    The files of a run, with the digits drawn after each epoch and the LeNet that judges the last ones.

    Args:
        args (argparse.Namespace): The options.
        fingerprint (str): That of the data.
    """

    def __init__(self, args, fingerprint):
        settings = ("loss", "filters", "latent", "update", "n_critic", "separate_scales")
        super().__init__(args, "gan.ckpt", Step, settings, fingerprint)
        # It depends on the data, not on the run.
        self.judge = self.folder / "judge.ckpt"

    def files(self):
        return [*super().files(), *self.folder.glob("epoch-*.png")]

    def save(self, cell, epoch, steps, images):
        save_grid(self.folder / f"epoch-{epoch:03}.png", images)
        super().save(cell, epoch, steps)
