"""Numbers as people read them, in tables, pages and figures."""

import math


def shown(value: object) -> str:
    """A value for people: large numbers in groups or powers of ten, four digits of a fraction, a dash for none.

    >>> shown(1234567), shown(2.5e15), shown(2.34567), shown(None), shown("dense")
    ('1,234,567', '2.5·10¹⁵', '2.346', '-', 'dense')
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not -1e300 < value < 1e300:  # infinite or not a number
        return str(value)
    if abs(value) >= 1e10:
        return power_of_ten(value)
    if isinstance(value, int) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def power_of_ten(value: float) -> str:
    """A number as people write large ones.

    >>> power_of_ten(2.5e12), power_of_ten(1e9), power_of_ten(0)
    ('2.5·10¹²', '10⁹', '0')
    """
    if value <= 0:
        return "0" if value == 0 else f"-{power_of_ten(-value)}"
    exponent = math.floor(math.log10(value) + 1e-9)
    raised = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    factor = f"{value / 10.0**exponent:.3g}"
    return raised if factor == "1" else f"{factor}·{raised}"


def percent(share: float) -> str:
    """A share for a label.

    >>> percent(0.125), percent(0.5), percent(0.0004)
    ('12.5 %', '50 %', '0.04 %')
    """
    return f"{100 * share:.2g} %" if share < 0.01 else f"{100 * share:.1f} %".replace(".0", "")


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(7.4), duration(600), duration(9000), duration(200_000)
    ('7 s', '10 min', '2.5 h', '2.3 days')
    """
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def compact(value: float) -> str:
    """A count for the tick of an axis.

    >>> compact(750), compact(12_300), compact(1.5e6), compact(2e13)
    ('750', '12.3K', '1.5M', '2·10¹³')
    """
    for size, letter in ((1e3, ""), (1e6, "K"), (1e9, "M"), (1e12, "B")):
        if value < 0.9995 * size:
            return f"{value / (size / 1e3):.3g}{letter}"
    return power_of_ten(value)
