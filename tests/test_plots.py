"""Figures: what is drawn is what was given, all of it can be read, and no torch is needed."""

import math
import subprocess
import sys
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.patches import StepPatch
from matplotlib.text import Text

from modepth.plots import figure_bytes, loss_against_flops, save_figure, score_histograms, token_map
from modepth.plots.style import DENSE, ROUTED, RUN_COLOURS, SKIPPED
from tests.test_project import ROOT, loaded

TOKENS = ["def", " f", "(x", "):", "\n", "    ", "<b>", "$a$", "é中", "a_long_token_name", "\t", ""]


def rows(num_steps=40, every=10, floor=2.0, flops=3e12):
    """A log as training writes it: steps, measurements, an event."""
    for step in range(num_steps):
        loss = floor + 3 / math.sqrt(step + 1)
        if step == 7:
            yield {"step": step, "event": "update not applied", "reason": "the loss is not finite"}
            continue
        yield {"step": step, "loss": loss, "router_losses": {"predictor": 99.0}, "flops": (step + 1) * flops}
        if (step + 1) % every == 0:
            yield {
                "step": step + 1,
                "validation": {"loss": loss + 0.01, "perplexity": 77.0},
                "flops": (step + 1) * flops,
            }


def texts(figure):
    """Every text that is drawn, with the rectangle that it takes."""
    renderer, drawn, draw = FigureCanvasAgg(figure).get_renderer(), [], Text.draw
    with mock.patch.object(Text, "draw", lambda text, *args: (drawn.append(text), draw(text, *args))):
        figure.draw(renderer)
    shown = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), Text.get_window_extent(text, renderer)) for text in shown]


def check_readable(figure):
    """No text leaves the figure, and no two overlap."""
    width, height = figure.bbox.width, figure.bbox.height
    shown = texts(figure)
    for text, box in shown:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"{text!r} is clipped"  # noqa: PT018
    for (one, a), (other, b) in combinations(shown, 2):
        across, up = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or up <= 1, f"{one!r} overlaps {other!r}"
    return [text for text, _ in shown]


# -- loss against FLOPs


def test_the_curves_are_the_language_losses_of_the_rows():
    runs = {"dense": list(rows()), "MoD 12.5 %": list(rows(floor=1.9))}
    (axes,) = loss_against_flops(runs).axes
    lines = axes.get_lines()
    assert len(lines) == 4
    for number, run in enumerate(runs.values()):
        training, validation = lines[2 * number : 2 * number + 2]
        assert training.get_xydata().tolist() == [[row["flops"], row["loss"]] for row in run if "loss" in row]
        measured = [[row["flops"], row["validation"]["loss"]] for row in run if "validation" in row]
        assert validation.get_xydata().tolist() == measured
        assert training.get_color() == validation.get_color() == RUN_COLOURS[number]
        assert training.get_alpha() < 0.5
        assert validation.get_marker() != "None"


def test_each_run_is_labelled_beside_its_end_with_its_last_validation_loss():
    runs = {"dense": list(rows()), "MoD, half": list(rows(floor=1.9))}
    shown = check_readable(loss_against_flops(runs))
    for name, run in runs.items():
        assert f"{name}\n{run[-1]['validation']['loss']:.3f}" in shown


@pytest.mark.parametrize("number", [1, 2, 7, 12])
def test_labels_of_runs_that_end_together_do_not_overlap(number):
    check_readable(loss_against_flops({f"run number {n}": list(rows(floor=2 + n / 1e4)) for n in range(number)}))


def test_a_long_name_widens_the_figure_and_leaves_the_plot_its_width():
    figure = loss_against_flops({"a run with a name that says all there is to say about it": list(rows())})
    check_readable(figure)
    assert figure.axes[0].get_window_extent().width / figure.dpi > 2


def test_flops_are_drawn_by_powers_of_ten_where_they_span_one():
    assert loss_against_flops({"long": list(rows(num_steps=100, every=5))}).axes[0].get_xscale() == "log"
    assert loss_against_flops({"short": list(rows(num_steps=40, every=20))}).axes[0].get_xscale() == "linear"


def test_the_view_holds_every_validation_point():
    (axes,) = loss_against_flops({"a": list(rows()), "b": list(rows(num_steps=90, floor=1.0))}).axes
    for line in axes.get_lines()[1::2]:
        x, y = line.get_data()
        assert axes.get_xlim()[0] < min(x) <= max(x) < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < min(y) <= max(y) < axes.get_ylim()[1]


@pytest.mark.parametrize(
    "log",
    [
        [{"flops": 5, "loss": 2.0}],
        [{"flops": 5, "validation": {"loss": 2.0}}],
        [{"flops": 1, "loss": 2.0}, {"flops": 2, "loss": math.nan}, {"flops": 3, "loss": 2.1}],
        [{"flops": 1, "validation": {"loss": 2.0}}, {"flops": 2, "validation": {"loss": math.nan}}],
    ],
)
def test_a_run_with_few_or_bad_points_is_drawn(log):
    check_readable(loss_against_flops({"$x$ 中\n": log}))


def test_a_run_that_diverged_is_labelled_so():
    log = [{"flops": 1, "validation": {"loss": 2.0}}, {"flops": 2, "validation": {"loss": math.nan}}]
    assert "bad\nnan" in check_readable(loss_against_flops({"bad": log}))


def test_logs_without_losses_are_refused():
    with pytest.raises(ValueError, match="no run to draw"):
        loss_against_flops({})
    with pytest.raises(ValueError, match="run 'empty': none of its 1 rows has a loss"):
        loss_against_flops({"empty": [{"step": 0, "event": "config changed"}]})


# -- tokens x layers


def chosen(num_layers, num_tokens, seed=0):
    return np.random.default_rng(seed).random((num_layers, num_tokens)) < 0.3


def cells(figure):
    """The colours of the map's cells, its rows put side by side again."""
    meshes = [artist for axes in figure.axes for artist in axes.collections if isinstance(artist, QuadMesh)]
    return np.concatenate([mesh.to_rgba(mesh.get_array()) for mesh in meshes], axis=1), meshes


def rgba(colour):
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] + [1.0]


@pytest.mark.parametrize("num_tokens", [1, 7, 48, 49, 100])
def test_the_map_shows_what_was_computed_skipped_and_dense(num_tokens):
    given = chosen(5, num_tokens)
    drawn, _ = cells(token_map(["t"] * num_tokens, given, routed_layers=(1, 3)))
    assert drawn.shape == (5, num_tokens, 4)
    for layer in range(5):
        for token in range(num_tokens):
            colour = DENSE if layer not in (1, 3) else ROUTED if given[layer, token] else SKIPPED
            assert drawn[layer, token] == pytest.approx(rgba(colour))


def test_the_labels_are_the_tokens_with_white_space_visible():
    figure = token_map(TOKENS, chosen(3, len(TOKENS)), routed_layers=[1])
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["def", "·f", "(x", "):", "⏎", "····", "<b>", "$a$", "é□", "a_long_toke…", "⇥", ""]
    assert set(labels) - {""} <= set(check_readable(figure))


def test_dense_layers_are_marked_and_routed_ones_carry_their_share():
    given = np.zeros((5, 8), dtype=bool)
    given[3, 2] = True
    figure = token_map(list("abcdefgh"), given, routed_layers=[1, 3])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "dense 0",
        "1",
        "dense 2",
        "3",
        "dense 4",
    ]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0 %", "12.5 %"]
    assert {"computed", "skipped", "dense layer"} <= set(check_readable(figure))


def test_layer_0_is_at_the_bottom_beside_the_tokens():
    axes = token_map(list("ab"), chosen(4, 2), routed_layers=[1]).axes[0]
    ticks = axes.get_yticks()
    assert sorted(ticks) == list(ticks)
    assert axes.get_ylim()[0] < axes.get_ylim()[1]


@pytest.mark.parametrize(("num_tokens", "lengths"), [(48, [48]), (64, [32, 32]), (100, [34, 34, 32])])
def test_long_snippets_wrap_into_rows_of_at_most_48(num_tokens, lengths):
    tokens = [f"{n} token"[:9] for n in range(num_tokens)]
    figure = token_map(tokens, chosen(6, num_tokens), routed_layers=[1, 3])
    assert [len(axes.get_xticklabels()) for axes in figure.axes] == lengths
    labels = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
    assert labels == [token.replace(" ", "·") for token in tokens]
    check_readable(figure)
    assert figure.get_size_inches()[0] <= 7


def test_a_map_of_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(layers, 2\), a column a token, got \(3, 5\)"):
        token_map(["a", "b"], np.ones((3, 5)), [1])
    with pytest.raises(ValueError, match=r"routed_layers must be in 0..2 for 3 layers, got \[3\]"):
        token_map(["a", "b"], np.ones((3, 2)), [1, 3])
    with pytest.raises(ValueError, match="a column a token"):
        token_map([], np.ones((3, 0)), [1])


# -- scores


def steps(axes):
    """Counts by label of the filled histograms."""
    return {
        patch.get_label(): patch.get_data()
        for patch in axes.patches
        if isinstance(patch, StepPatch) and patch.get_fill()
    }


def test_the_histograms_count_every_token_once_by_its_score():
    generator = np.random.default_rng(0)
    logits = {layer: generator.normal(layer - 3, 2, 501) for layer in (1, 3, 5)}
    routed = {layer: generator.random(501) < 0.2 for layer in (1, 3, 5)}
    figure = score_histograms(logits, routed)
    assert len(figure.axes) == 3
    for axes, layer in zip(figure.axes, (1, 3, 5), strict=True):
        for label, part in (("routed", routed[layer]), ("skipped", ~routed[layer])):
            drawn = steps(axes)[label]
            scores = [1 / (1 + math.exp(-logit)) for logit in logits[layer][part]]
            for count, low, high in zip(drawn.values, drawn.edges, drawn.edges[1:], strict=False):
                assert count == sum(low <= score < high for score in scores)
            assert drawn.values.sum() == part.sum()


def test_each_panel_says_the_share_routed_and_draws_the_lowest_routed_score():
    figure = score_histograms({2: [-9.0, -1.0, 0.0, 3.0]}, {2: [False, False, True, True]})
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "layer 2: 50 % routed, lowest 0.50"
    (line,) = axes.get_lines()
    assert line.get_xdata() == [0.5, 0.5]
    assert {"routed", "skipped"} <= set(check_readable(figure))


def test_a_cutoff_that_is_given_is_drawn_instead():
    (axes,) = score_histograms({2: [-9.0, 3.0]}, {2: [False, True]}, cutoffs={2: math.log(3)}).axes
    assert axes.get_title(loc="left") == "layer 2: 50 % routed, cutoff 0.75"
    assert axes.get_lines()[0].get_xdata() == pytest.approx([0.75, 0.75])


def test_a_layer_that_routed_nothing_has_no_cutoff():
    (axes,) = score_histograms({2: [-800.0, 800.0]}, {2: [False, False]}).axes
    assert axes.get_title(loc="left") == "layer 2: 0 % routed"
    assert len(axes.get_lines()) == 0
    assert steps(axes)["skipped"].values[[0, -1]].tolist() == [1, 1]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 11])
def test_any_number_of_layers_is_readable(number):
    logits = {100 + layer: np.linspace(-4, 4, 20_000) for layer in range(number)}
    figure = score_histograms(logits, {layer: values > 3 for layer, values in logits.items()})
    assert len(figure.axes) == number
    check_readable(figure)


def test_scores_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"same layers, one or more, got \[1\] and \[2\]"):
        score_histograms({1: [0.0]}, {2: [True]})
    with pytest.raises(ValueError, match=r"layer 1: .* equal length, got \(\(2,\), \(1,\)\)"):
        score_histograms({1: [0.0, 1.0]}, {1: [True]})
    with pytest.raises(ValueError, match="layer 1: logits must be finite"):
        score_histograms({1: [0.0, math.inf]}, {1: [True, True]})


# -- files


def test_a_figure_is_saved_as_png_and_svg_with_the_same_bytes_each_time(tmp_path):
    def draw():
        return token_map(TOKENS, chosen(3, len(TOKENS)), routed_layers=[1])

    png, svg = save_figure(draw(), tmp_path / "new" / "map.v1")
    assert [path.name for path in (png, svg)] == ["map.v1.png", "map.v1.svg"]
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in svg.read_bytes()
    again = save_figure(draw(), tmp_path / "again.png")
    assert [path.read_bytes() for path in again] == [png.read_bytes(), svg.read_bytes()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.png", "again.svg", "new"]
    script = "import sys; from tests.test_plots import TOKENS, chosen, figure_bytes, token_map;"
    script += "sys.stdout.buffer.write(figure_bytes(token_map(TOKENS, chosen(3, len(TOKENS)), routed_layers=[1])))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=ROOT)
    assert other.stdout == svg.read_bytes()


def test_files_carry_neither_date_nor_program():
    figure = score_histograms({2: [-9.0, 3.0]}, {2: [False, True]})
    for format in ("svg", "png"):
        data = figure_bytes(figure, format)
        assert b"Software" not in data
        assert b"creator" not in data
        assert b"date" not in data.lower()
    with pytest.raises(ValueError, match="format must be one of png, svg, got 'pdf'"):
        figure_bytes(figure, "pdf")


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.map\.png: cannot be written"):
        save_figure(score_histograms({2: [1.0]}, {2: [True]}), tmp_path / "file" / "map")


def test_dollars_are_not_mathematics():
    for figure in (token_map(["$\\frac$"], [[1]], [0]), loss_against_flops({"$\\frac$": list(rows())})):
        assert any("$\\frac$" in text for text in check_readable(figure))


# -- what it needs


@pytest.mark.parametrize(
    "module", ["modepth.plots", "modepth.plots.curves", "modepth.plots.routing", "modepth.plots.style"]
)
def test_plots_load_neither_torch_nor_pyplot(module):
    assert loaded(f"import {module}") == ["matplotlib"]


@pytest.mark.parametrize("module", ["modepth.plots.curves", "modepth.report"])
def test_without_matplotlib_the_error_says_what_to_install(module):
    script = f"import sys; sys.modules['matplotlib'] = None\nimport {module}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ImportError: figures need matplotlib: pip install 'modepth[plots]'" in result.stderr


def test_drawing_leaves_the_users_settings_alone():
    import matplotlib  # noqa: PLC0415

    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 40, "axes.grid": True}):
        big = loss_against_flops({"a": list(rows())})
    assert dict(matplotlib.rcParams) == before
    assert figure_bytes(big) == figure_bytes(loss_against_flops({"a": list(rows())}))
