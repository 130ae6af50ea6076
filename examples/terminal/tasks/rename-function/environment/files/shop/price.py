"""Prices."""


def calc(prices, discount=0.0):
    """The sum of the prices less the discount, a share."""
    return sum(prices) * (1 - discount)


def calculate_tax(amount):
    """A fifth."""
    return amount / 5
