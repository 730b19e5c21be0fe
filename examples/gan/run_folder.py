"""The files of a run in the output folder."""

import json
from pathlib import Path

import mindspore
from common.output import replacing
from record import read_csv, save_grid, write_csv


class InputError(Exception):
    """What is wrong with the folder to resume from, or the like, in one line for the user."""


class Run:
    """The files of a run in the output folder: a new run removes earlier ones, a resumed one continues them."""

    def __init__(self, args, fingerprint):
        self.folder = Path(args.output)
        names = ("gan.ckpt", "steps.csv", "curves.png", "judge.ckpt")
        self.checkpoint, self.table, self.curves, self.judge = (self.folder / name for name in names)
        # What must be the same for a resumed run to end where the uninterrupted one would have.
        names = "loss batch_size seed filters latent learning_rate accumulate clip_norm ema amp_level update n_critic"
        names += " max_retries loss_scale scale scale_window milestone scales separate_scales"
        self._settings = {name: getattr(args, name) for name in names.split()}
        self._settings["data"] = fingerprint

    def begin(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in (self.checkpoint, self.table, self.curves, *self.folder.glob("epoch-*.png")):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"can't write to the output folder: {error}") from None

    def resume(self, cell, steps_per_epoch):
        """Loads the last whole epoch into the cell. Returns its number and the steps up to its end."""
        if not self.checkpoint.is_file():
            raise InputError(f"nothing to resume: {self.checkpoint} does not exist; train without --resume first")
        try:
            parameters = mindspore.load_checkpoint(str(self.checkpoint))
            epoch, settings = int(parameters.pop("epoch")), json.loads(parameters.pop("settings"))
        except (ValueError, RuntimeError, KeyError) as error:
            raise InputError(
                f"{self.checkpoint} is no checkpoint of this program: {str(error).splitlines()[0]}"
            ) from None
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise InputError(
                    f"can't resume: the run in {self.folder} has {name} {settings.get(name)}, not {value}; pass the "
                    f"same, or another --output"
                )
        mindspore.load_param_into_net(cell, parameters, strict_load=True)
        try:
            return epoch, read_csv(self.table, epoch * steps_per_epoch)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"can't resume: {self.table} does not go with the checkpoint: {error}") from None

    def save(self, cell, epoch, steps, images):
        # The checkpoint last: without its steps it could not be resumed, while a table with too many can.
        save_grid(self.folder / f"epoch-{epoch:03}.png", images)
        write_csv(self.table, steps)
        with replacing(self.checkpoint) as part:
            mindspore.save_checkpoint(
                cell, str(part), append_dict={"epoch": epoch, "settings": json.dumps(self._settings)}
            )
