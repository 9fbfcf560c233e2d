import numpy as np
import pytest
from paper_equations import sinusoidal_positions

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.errors import UserError
from vanilla_transformer.visualization.positions import positions_picture, shift_map, sinusoids


LAYOUTS = [("interleaved", "paper"), ("concatenated", "paper"), ("concatenated", "tensor2tensor")]


def config_of(layout="interleaved", exponent="paper", d_model=32):
    return VanillaTransformerConfig(
        d_model=d_model, encoder_attention_heads=1, decoder_attention_heads=1, sinusoidal_layout=layout,
        sinusoidal_exponent=exponent,
    )  # fmt: skip


def panel(picture, title):
    (found,) = [panel for panel in picture.panels if panel.title.startswith(title)]
    return found


@pytest.mark.parametrize(("layout", "exponent"), LAYOUTS)
def test_sinusoids_are_those_of_the_paper(layout, exponent):
    expected = sinusoidal_positions(50, 32, layout=layout, exponent=exponent)
    np.testing.assert_allclose(sinusoids(config_of(layout, exponent), 50), expected, atol=1e-9)


@pytest.mark.parametrize(("layout", "exponent"), LAYOUTS)
@pytest.mark.parametrize("shift", [-7, 0, 1, 20])
def test_one_linear_map_shifts_every_position(layout, exponent, shift):
    config = config_of(layout, exponent)
    matrix, table = shift_map(config, shift), sinusoidal_positions(300, 32, layout=layout, exponent=exponent)
    first, last = max(0, -shift), min(300, 300 - shift)
    np.testing.assert_allclose(table[first:last] @ matrix.T, table[first + shift : last + shift], atol=1e-9)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(32), atol=1e-12)


def test_products_depend_on_the_distance():
    picture = positions_picture(config_of(), length=40, shift=3)
    products = picture.arrays["products"]
    for distance in range(40):
        diagonal = np.diagonal(products, offset=distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-9)
    assert products[0, 0] == pytest.approx(32 / 2)
    assert float(picture.arrays["shift_error"]) < 1e-9
    (curve,) = panel(picture, "Dot product by distance").series
    assert curve.y[list(curve.x).index(0)] == max(curve.y)


def test_learned_positions_stand_beside_and_end():
    learned = np.random.default_rng(0).normal(size=(20, 32))
    picture = positions_picture(config_of(), length=40, trained_length=10, learned=learned, model_name="mine")
    np.testing.assert_array_equal(picture.arrays["learned"], learned)
    sinusoidal, other = panel(picture, "Beyond").series
    assert (len(sinusoidal.y), len(other.y)) == (40, 20)
    np.testing.assert_allclose(sinusoidal.y[:10], 1.0)
    np.testing.assert_allclose(other.y[:10], 1.0)
    assert max(sinusoidal.y[10:]) < 1.0 and max(other.y[10:]) < 1.0
    assert panel(picture, "Learned positions of mine").values.shape == (20, 32)


def test_nothing_lies_beyond_an_unknown_training_length():
    titles = [panel.title for panel in positions_picture(config_of(), length=8, shift=1).panels]
    assert not any(title.startswith("Beyond") for title in titles)


def test_an_odd_width_has_no_sinusoids():
    config = VanillaTransformerConfig(
        d_model=15, encoder_attention_heads=1, decoder_attention_heads=1, position_embedding_type="learned"
    )
    with pytest.raises(UserError, match="width is 15"):
        positions_picture(config, learned=np.ones((8, 15)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1}, "--length is 1"),
        ({"length": 2000}, "at most 1024"),
        ({"length": 5, "shift": 5}, "--shift is 5"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        positions_picture(config_of(), **settings)
