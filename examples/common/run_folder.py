"""The files of a run in the output folder."""

import json
from pathlib import Path

import mindspore

from common.input_error import InputError
from common.output import counted, replacing
from common.steps_table import read_steps, write_steps
from ms_lossscale import merge_shards

# Options of both examples that must not change, so that a resumed run ends as the uninterrupted one would have.
_SETTINGS = (
    *("batch_size", "seed", "learning_rate", "amp_level", "accumulate", "clip_norm", "max_retries", "ema"),
    *("loss_scale", "scale", "scale_window", "milestone", "scales"),
)


class RunFolder:
    """
    The files of a run in the output folder. A new run removes earlier ones, a resumed run continues them.

    Args:
        args (argparse.Namespace): The options.
        checkpoint (str): The name of the checkpoint.
        step_type (type): The type of a row of the table.
        settings (tuple[str]): The options that must not change on resume, besides those that both examples have.
        fingerprint (str): That of the data, which must not change either.
    """

    def __init__(self, args, checkpoint, step_type, settings, fingerprint):
        self.folder = Path(args.output)
        self.checkpoint, self.table, self.curves = (
            self.folder / name for name in (checkpoint, "steps.csv", "curves.png")
        )
        self._args, self._step_type = args, step_type
        self._settings = {name: getattr(args, name) for name in (*settings, *_SETTINGS)}
        self._settings["data"] = fingerprint

    def files(self):
        """Returns the files that an earlier run may have left."""
        return [self.checkpoint, self.table, self.curves]

    def start(self, cell, steps_per_epoch, ranks):
        """Begins or resumes a run. Returns the number of the last whole epoch and the steps up to its end."""
        if self._args.accumulate > steps_per_epoch:
            raise InputError(
                f"--accumulate {self._args.accumulate} is more than the {steps_per_epoch} batches of an epoch, and no "
                f"cycle goes on in the next one: pass {steps_per_epoch} or less"
            )
        if self._args.resume:
            epoch, steps = self._resume(cell, steps_per_epoch)
            if ranks.is_first:
                print(f"Resuming after epoch {epoch} of {self._args.epochs}")
            return epoch, steps
        if ranks.is_first:
            self._begin()
        return 0, []

    def _begin(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.files():
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"can't write to the output folder: {error}") from None

    def _resume(self, cell, steps_per_epoch):
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
        if epoch > self._args.epochs:
            raise InputError(
                f"can't resume: the run in {self.folder} has made {counted(epoch, 'epoch', 'epochs')}, more than "
                f"--epochs {self._args.epochs}; pass {epoch} or more, or another --output"
            )
        cell.load_state_dict(parameters)
        try:
            return epoch, read_steps(self.table, self._step_type, epoch * steps_per_epoch)
        except (OSError, ValueError) as error:
            raise InputError(f"can't resume: {self.table} does not go with the checkpoint: {error}") from None

    def whole_state(self, cell, ranks):
        """Merges what all ranks save of a cell whose optimizer shares its state; None except on the first rank."""
        parts = [self.checkpoint.with_suffix(f".rank_{rank}.ckpt") for rank in range(ranks.count)]
        mindspore.save_checkpoint(cell, str(parts[ranks.rank]))
        ranks.wait()
        if not ranks.is_first:
            return None
        whole = merge_shards(parts)
        for part in parts:
            part.unlink()
        return [{"name": name, "data": value} for name, value in whole.items()]

    def save(self, state, epoch, steps):
        """Saves a run after an epoch, with a cell as its state, or what `whole_state` returned."""
        # The checkpoint comes last: it can't be resumed without its steps, but it can with too many of them.
        write_steps(self.table, self._step_type, steps)
        with replacing(self.checkpoint) as part:
            mindspore.save_checkpoint(
                state, str(part), append_dict={"epoch": epoch, "settings": json.dumps(self._settings)}
            )
