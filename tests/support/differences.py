"""The fenced differences of pages."""


def side_of(difference, sign):  # The code before (-) or after (+) a difference.
    return "".join(f"{line[1:]}\n" for line in difference.splitlines() if line[:1] in ("", " ", sign))
