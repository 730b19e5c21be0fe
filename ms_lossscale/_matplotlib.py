"""matplotlib, which only who plots needs."""


def matplotlib_figure(what):
    """matplotlib's Figure; an ImportError that names what is not to be had without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure
