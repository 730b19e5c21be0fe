"""
Makes the pictures of the README and the docs from runs of the examples.

    python examples/pictures.py

The runs go to output/pictures. Complete ones that are already there are used as they are.
"""

import subprocess
import sys
from pathlib import Path

from common.output import replacing
from matplotlib import image as png
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
RUNS, PICTURES = ROOT / "output" / "pictures", ROOT / "docs" / "pictures"

# For each run: the script, its arguments, and the file that it writes last.
SCRIPTS = {
    "lenet": ("lenet/train.py", ["--amp-level", "O3", "--scale-window", "40", "--max-retries", "1"], "curves.png"),
    "diagnose": ("lenet/diagnose.py", [], "accuracy.txt"),
    "gan": ("gan/train.py", [], "curves.png"),
    "which_steps_count": ("which_steps_count/train.py", [], "losses.csv"),
}
EPOCHS = (1, 3, 10, 48)
# How many rows and columns are shown of the GAN example's grid, and the pixels of a digit in it.
SHOWN, DIGIT = 6, 56
COLORS = 256


def run(name):
    script, arguments, last = SCRIPTS[name]
    folder = RUNS / name
    if not (folder / last).exists():
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / script), "--output", str(folder), *arguments], check=True
        )
    return folder


def digits(folder):
    """Writes what the GAN draws from the same noise after several epochs. Returns the picture's path."""
    figure = Figure(figsize=(9, 2.6), dpi=110, layout="constrained")
    for epoch, axes in zip(EPOCHS, figure.subplots(1, len(EPOCHS))):
        (path,) = folder.glob(f"epoch-*{epoch:03d}.png")
        axes.imshow(png.imread(path)[: SHOWN * DIGIT, : SHOWN * DIGIT])
        axes.set_title(f"epoch {epoch}")
        axes.set_axis_off()
    figure.savefig(folder / "digits.png")
    return folder / "digits.png"


def publish(path, name, width):
    """Saves a small picture that loads at once, on a light background, since a page may be dark."""
    PICTURES.mkdir(exist_ok=True)
    picture = Image.open(path).convert("RGBA")
    ground = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(ground, picture).convert("RGB")
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.LANCZOS)
    published = PICTURES / f"{name}.png"
    with replacing(published) as part:
        picture.quantize(COLORS).save(part, optimize=True)
    print(f"{published}: {published.stat().st_size / 1024:.0f} KB")


def main():
    publish(run("lenet") / "curves.png", "lenet", 900)
    diagnosis = run("diagnose")
    publish(diagnosis / "gradients_scaled.png", "gradients", 1100)
    publish(diagnosis / "activations.png", "activations", 1100)
    publish(digits(run("gan")), "gan-digits", 900)
    publish(run("which_steps_count") / "curves.png", "which_steps_count", 900)


if __name__ == "__main__":
    main()
