from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mvcompile.measure.traffic_affine import Affine, Algebra, Opaque, add, constant

EXTENTS = (56, 7, 32, 3)
"""Extents of the axes in these tests; axis numbers are positions."""


def axis(number: int, factor: int = 1) -> Affine:
    return Affine({(number, 1, EXTENTS[number]): factor}, 0)


def evaluate(form: Affine, values: tuple[int, ...]) -> int:
    total = form.const
    for term, factor in form.terms.items():
        if isinstance(term, Opaque):
            inner = evaluate(term.parts[0], values)
            total += factor * (inner // term.divisor if term.kind == "div" else inner % term.divisor)
        else:
            number, low, extent = term
            total += factor * (values[number] // low % extent)
    return total


values = st.tuples(*(st.integers(0, extent - 1) for extent in EXTENTS))
forms = st.builds(
    lambda factors, const: Affine({(n, 1, EXTENTS[n]): f for n, f in enumerate(factors) if f}, const),
    st.tuples(*(st.integers(-3, 40) for _ in EXTENTS)),
    st.integers(-20, 100),
)


@given(forms, st.integers(1, 64), st.integers(1, 16), values)
def test_division_by_constants_is_exact_and_bounded(form: Affine, k: int, again: int, at: tuple[int, ...]) -> None:
    algebra = Algebra()
    quotient, rest = algebra.divmod(form, k)
    value = evaluate(form, at)
    assert (evaluate(quotient, at), evaluate(rest, at)) == divmod(value, k)
    for part in (*algebra.divmod(quotient, again), *algebra.divmod(rest, again), rest, quotient):
        low, high = part.range()
        assert low <= evaluate(part, at) <= high
    inner, inner_rest = algebra.divmod(rest, again)
    assert evaluate(inner, at) * again + evaluate(inner_rest, at) == value % k


def is_linear(form: Affine) -> bool:
    return not any(isinstance(term, Opaque) for term in form.terms)


def test_packed_channels_become_panel_and_lane() -> None:
    lanes = add(axis(1, 4), axis(3))
    assert Algebra().divmod(add(axis(2, 32), lanes), 32) == (axis(2), lanes)
    too_wide = add(axis(1, 5), axis(3))  # up to 32
    assert not any(map(is_linear, Algebra().divmod(add(axis(2, 32), too_wide), 32)))


def test_half_a_panel_splits_the_tile_loop() -> None:
    quotient, rest = Algebra().divmod(add(axis(2, 16), axis(1, 2)), 32)
    assert quotient.terms == {(2, 2, 16): 1}
    assert rest.terms == {(2, 1, 2): 16, (1, 1, 7): 2}


def test_a_fused_loop_is_split_where_its_parts_divide() -> None:
    tile = add(axis(0, 7), axis(1))  # 7 * v0 + v1 with v1 < 7, of 392 pixels in rows of 56
    quotient, rest = Algebra().divmod(tile, 56)
    assert quotient.terms == {(0, 8, 7): 1}
    assert rest.terms == {(0, 1, 8): 7, (1, 1, 7): 1}


def test_equal_opaque_terms_are_one() -> None:
    algebra = Algebra()
    tile = add(axis(0, 4), axis(3))
    assert algebra.divmod(tile, 7) == algebra.divmod(add(axis(3), axis(0, 4)), 7)
    assert algebra.unknown() != algebra.unknown()


def test_a_choice_that_is_always_the_same_is_no_choice() -> None:
    algebra = Algebra()
    assert algebra.pick((axis(1), constant(6)), largest=False) == axis(1)
    assert algebra.pick((axis(1), constant(0)), largest=True) == axis(1)
    assert algebra.pick((axis(1), constant(3)), largest=False).range() == (0, 3)
    assert algebra.either((axis(1), constant(-2))).range() == (-2, 6)
