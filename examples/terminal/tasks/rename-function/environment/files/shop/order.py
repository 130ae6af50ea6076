"""Orders."""

from shop import price


def bill(order):
    """What an order costs, with tax."""
    amount = price.calc(order)
    return amount + price.calculate_tax(amount)
