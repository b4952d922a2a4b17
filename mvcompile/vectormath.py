"""`exp`, `tanh`, `erf` and `sigmoid` of float32 as operators that become vector code on every target.

TVM leaves these functions to the C library, one call an element (3 to 12 ns). The operators here are expanded to polynomials when
code is generated, after all scheduling: schedules see a call, as before, and whatever width a loop was vectorised to is the width
of the expansion. Code may call them after `mvcompile.vectormath` was imported; a program that names them cannot be read before.

Largest errors against the exact value, with and without fused multiply-add, in units in the last place of float32: `exp` 1,
`sigmoid` and `tanh` 2.5, `erf` 6; results below the smallest normal number are off by at most one step of the subnormal grid.
NaN gives NaN, infinities and the signs of zeros give what the C library gives, and no value exceeds a function's limit:
`1 + tanh(x)` and `1 + erf(x)`, which are multiplied by x in GELU, are exactly 0 for x far below 0.

Method: the argument reduction is that of Cody and Waite (Software Manual for the Elementary Functions, 1980), with the split of
ln 2 that the Cephes library uses; the rounding by addition of 1.5 * 2^23 is Dekker's. Coefficients are minimax fits in double
precision of what each function's comment says, by iteratively reweighted least squares (Lawson 1961).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.prim import Let
from tvm.tirx.op import register_intrin_lowering

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
"""ln 2 as a number of 9 bits, whose products with exponents are exact, and the rest."""
ROUNDER, ROUNDER_BITS = 12582912.0, 0x4B400000
"""1.5 * 2^23: added to a number below 2^22, leaves it rounded to an integer in the lowest bits."""
ONE_BITS, SIGN_BIT, MANTISSA_BITS = 0x3F800000, -0x80000000, 23

SHIFT = 64
"""How far exponents are moved away from -126 while they are factors."""

EXP_LEAST, EXP_MOST = -104.0, 89.0
"""exp of less rounds to 0, of more to infinity."""
TANH_MOST = 9.1
"""tanh of more rounds to 1, and so does what is computed for this argument."""
ERF_MOST = 3.92
"""erf of more rounds to 1."""

EXP_TERMS = (0.49999993412424965, 0.16666520107143845, 0.04166839422614702, 0.008368780473894123, 0.0013814466334175187)
"""(e^r - 1 - r) / r^2 for |r| <= ln(2)/2; error 3.1e-9 of e^r."""
ERF_NUMERATOR = (
    1.128379145361593,
    0.19078350126788834,
    0.052790251155297716,
    0.003779597145792021,
    0.0002848086033745056,
    2.041976658495352e-06,
)
ERF_DENOMINATOR = (
    1.0,
    0.5024101954514616,
    0.11425739362965665,
    0.01499741356846516,
    0.0011652102780435709,
    3.800413681005678e-05,
)
"""erf(x) / x as a quotient of polynomials in x^2 for |x| <= 3.93; relative error 1.9e-8."""


class _Lanes:
    """Builds an expression of as many lanes as a call has. What is used more than once is bound to a variable."""

    def __init__(self, call: Any) -> None:
        self.lanes = int(call.ty.dtype.lanes)
        self._bindings: list[tuple[Any, Any]] = []
        self.argument = self.bind(call.args[0])

    def floats(self, value: float) -> Any:
        return tirx.const(value, self._dtype("float32"))

    def integers(self, value: int) -> Any:
        return tirx.const(value, self._dtype("int32"))

    def bind(self, value: Any) -> Any:
        variable = tirx.Var("v", value.ty.dtype)
        self._bindings.append((variable, value))
        return variable

    def bits(self, value: Any) -> Any:
        return self.bind(tirx.reinterpret(self._dtype("int32"), value))

    def of_bits(self, value: Any) -> Any:
        return self.bind(tirx.reinterpret(self._dtype("float32"), value))

    def at_most(self, value: Any, limit: float) -> Any:
        """The smaller of both; NaN if `value` is."""
        return self.bind(tirx.Select(value > self.floats(limit), self.floats(limit), value))

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        *lower, result = (self.floats(each) for each in coefficients)
        for each in reversed(lower):
            result = result * x + each
        return self.bind(result)

    def close(self, result: Any) -> Any:
        """`result` with everything it is made of."""
        for variable, value in reversed(self._bindings):
            result = Let(variable, value, result)
        return result

    def _dtype(self, scalar: str) -> str:
        return scalar if self.lanes == 1 else f"{scalar}x{self.lanes}"


def _reduced(lanes: _Lanes, x: Any) -> tuple[Any, Any]:
    """x = n ln 2 + r with |r| <= ln(2)/2: the bits of 1.5 * 2^23 + n, and e^r - 1. For |x| < 2^21; NaN stays NaN."""
    rounded = lanes.bind(x * lanes.floats(LOG2_E) + lanes.floats(ROUNDER))
    n = lanes.bind(rounded - lanes.floats(ROUNDER))
    rest = lanes.bind(x - n * lanes.floats(LN2_HIGH) - n * lanes.floats(LN2_LOW))
    less_one = lanes.bind(rest * rest * lanes.polynomial(rest, EXP_TERMS) + rest)
    return lanes.bits(rounded), less_one


def _power_of_two(lanes: _Lanes, n: Any) -> Any:
    """2^n of integers -127 < n < 128; higher bits of `n` that the shift drops do no harm."""
    return lanes.of_bits((n << lanes.integers(MANTISSA_BITS)) + lanes.integers(ONE_BITS))


def _exp_of(lanes: _Lanes, x: Any) -> Any:
    """e^x for EXP_LEAST <= x <= EXP_MOST. Two factors 2^n, since one could not be written as a float32 at either end."""
    bits, less_one = _reduced(lanes, x)
    n = lanes.bind(bits - lanes.integers(ROUNDER_BITS))
    half = lanes.bind(n >> lanes.integers(1))
    return lanes.bind((less_one + lanes.floats(1.0)) * _power_of_two(lanes, half) * _power_of_two(lanes, n - half))


def _exp_of_negative(lanes: _Lanes, x: Any) -> Any:
    """e^x for EXP_LEAST <= x <= 0. Without large results, one factor can be shifted away from the least exponents."""
    bits, less_one = _reduced(lanes, x)
    shifted = lanes.of_bits((bits << lanes.integers(MANTISSA_BITS)) + lanes.integers(ONE_BITS + (SHIFT << MANTISSA_BITS)))
    return lanes.bind((less_one + lanes.floats(1.0)) * shifted * lanes.floats(2.0**-SHIFT))


def _exp_or_zero(lanes: _Lanes, x: Any, exponential: Callable[[_Lanes, Any], Any]) -> Any:
    """`exponential` of x, 0 below EXP_LEAST. A product that rounds to 0 would do as well, but costs an x86 processor 150 cycles,
    and attention asks for it of every token that is masked."""
    low, zero = x < lanes.floats(EXP_LEAST), lanes.floats(0.0)
    return lanes.bind(tirx.Select(low, zero, exponential(lanes, lanes.bind(tirx.Select(low, zero, x)))))


def _magnitude(lanes: _Lanes, x: Any) -> tuple[Any, Any]:
    """The sign bit and the absolute value."""
    bits = lanes.bits(x)
    return lanes.bind(bits & lanes.integers(SIGN_BIT)), lanes.of_bits(bits & lanes.integers(~SIGN_BIT))


def _signed(lanes: _Lanes, value: Any, sign: Any) -> Any:
    return lanes.of_bits(lanes.bits(value) | sign)


def expand_exp(call: Any) -> Any:
    """e^x."""
    lanes = _Lanes(call)
    return lanes.close(_exp_or_zero(lanes, lanes.at_most(lanes.argument, EXP_MOST), _exp_of))


def expand_sigmoid(call: Any) -> Any:
    """1 / (1 + e^-x) as e^x / (e^x + 1) for x < 0: the exponential never overflows, and small results keep their precision."""
    lanes = _Lanes(call)
    x = lanes.argument
    _, magnitude = _magnitude(lanes, x)
    falling = _exp_or_zero(lanes, lanes.bind(lanes.floats(0.0) - magnitude), _exp_of_negative)
    above = tirx.Select(x < lanes.floats(0.0), falling, lanes.floats(1.0))
    return lanes.close(above / (falling + lanes.floats(1.0)))


def expand_tanh(call: Any) -> Any:
    """(e^2x - 1) / (e^2x + 1), by e^2x - 1 = 2^n (e^r - 1) + (2^n - 1), which is as precise next to 0 as anywhere."""
    lanes = _Lanes(call)
    sign, magnitude = _magnitude(lanes, lanes.argument)
    magnitude = lanes.at_most(magnitude, TANH_MOST)
    bits, less_one = _reduced(lanes, lanes.bind(magnitude + magnitude))
    power = _power_of_two(lanes, bits)
    less_one = lanes.bind(power * less_one + (power - lanes.floats(1.0)))
    return lanes.close(_signed(lanes, lanes.bind(less_one / (less_one + lanes.floats(2.0))), sign))


def expand_erf(call: Any) -> Any:
    """x P(x^2) / Q(x^2). Beyond ERF_MOST the quotient may be anything, and is not used."""
    lanes = _Lanes(call)
    sign, magnitude = _magnitude(lanes, lanes.argument)
    square = lanes.bind(magnitude * magnitude)
    quotient = magnitude * lanes.polynomial(square, ERF_NUMERATOR) / lanes.polynomial(square, ERF_DENOMINATOR)
    inside = lanes.at_most(lanes.bind(quotient), 1.0)
    one = lanes.floats(1.0)
    return lanes.close(_signed(lanes, lanes.bind(tirx.Select(magnitude > lanes.floats(ERF_MOST), one, inside)), sign))


def expand_quarter_power(call: Any) -> Any:
    """x^(n/4) of a constant integer n that 4 does not divide, by square roots; NaN for x < 0. Up to 4 units in the last place for
    |n| <= 11."""
    lanes, exponent = _Lanes(call), call.args[1]
    quarters = int(exponent.value if isinstance(exponent, tirx.Broadcast) else exponent)
    base = lanes.bind(lanes.argument + lanes.floats(0.0))  # -0 is 0 here
    half = lanes.bind(tirx.sqrt(base))
    whole, rest = divmod(abs(quarters), 4)
    factors = {1: [tirx.sqrt(half)], 2: [half], 3: [half, tirx.sqrt(half)]}[rest] + [base] * whole
    result = math.prod(factors[1:], start=factors[0])
    # The only number below 0 whose powers the C library knows: -infinity.
    below = tirx.Select(base == lanes.floats(-math.inf), lanes.floats(math.inf), lanes.bind(result))
    return lanes.close(below if quarters > 0 else lanes.floats(1.0) / lanes.bind(below))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": expand_exp,
    "tanh": expand_tanh,
    "erf": expand_erf,
    "sigmoid": expand_sigmoid,
}
"""By the name of TVM's operator of the same meaning (`tirx.exp`, ...)."""


QUARTER_POWER = "mvcompile.quarter_power"
"""The operator for x^(n/4), of x and n: normalisations of responses take powers of 0.75, 9 ns an element in the C library."""


def operator(name: str) -> str:
    """The operator's name for one of FUNCTIONS."""
    return f"mvcompile.{name}"


def _register() -> None:
    known = set(tvm.ir.Op.list_op_names())
    pure = int(tvm.ir.Op.get("tirx.exp").get_attr("TCallEffectKind"))
    expansions = {operator(name): expand for name, expand in FUNCTIONS.items()} | {QUARTER_POWER: expand_quarter_power}
    for name, expand in expansions.items():
        if name in known:  # the module was loaded twice
            continue
        tvm.get_global_func("ir.RegisterOp")(name, "of float32, vectorised")
        tvm.ir.register_op_attr(name, "TCallEffectKind", pure)
        tvm.ir.register_op_attr(name, "TVectorizable", True)
        tvm.ir.register_op_attr(name, "TScriptPrinterName", name)
        register_intrin_lowering(name, "default", f=expand)


_register()
