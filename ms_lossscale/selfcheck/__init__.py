"""The proof on the user's own device: `python -m ms_lossscale.selfcheck` checks what this package promises."""
