"""Small statistics."""


def mean(values):
    """The mean of the values; 0 of none."""
    return sum(values) / len(values)


def median(values):
    """The middle value; of an even number the mean of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
