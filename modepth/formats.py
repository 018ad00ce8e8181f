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
