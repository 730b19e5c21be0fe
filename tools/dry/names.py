"""Names of the cells and settings that are counted, for programs that import no MindSpore (cells.py, settings.py)."""

SETTINGS = (
    *("clip_norm", "ema_decay", "max_retries=3", "accumulation of 4", "has_aux", "clip_value", "NormSpike"),
    *("a condition on the loss", "two conditions", "clip_norm and ema_decay"),
)
# What a cell's network may have, beside settings: BatchNorm, or so many layers.
BATCH_NORM, LAYERS = "BatchNorm", " layers"
OF_A_STEP = ("clip_norm and ema_decay", "accumulation of 4", "two conditions")
OF_A_CELL = (*OF_A_STEP, "max_retries=3")
# MindSpore's cells, and those of this package, plain and with what a step can have.
STOCK = ("unscaled", "stock")
CELLS = (
    *("scaled", f"scaled with {BATCH_NORM}", *(f"scaled with {each}" for each in OF_A_CELL)),
    *("simultaneous", *(f"simultaneous with {each}" for each in OF_A_CELL)),
    *("alternating", *(f"alternating with {each}" for each in OF_A_CELL)),
    *("manual", "compiled manual", *(f"compiled manual with {each}" for each in OF_A_STEP)),
)
