"""Clips of moving shapes: what is in a clip, the question about it, and its frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIZE = 112
"""Height and width in pixels."""
CELL = 28
"""Side of a cell of the 4x4 grid: one merged patch of the vision tower."""
NUM_CELLS = SIZE // CELL
RADIUS = 11.0
NUM_FRAMES = 16
FPS = 4

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (235, 215, 40)}
SHAPES = ("square", "ball")
DIRECTIONS = ("left", "right", "up", "down")
COUNTS = ("1", "2", "3", "4")

KINDS = ("direction", "colour", "count")
"""Kinds of question, in the order in which option `num_kinds` adds them."""
ANSWERS = {"direction": DIRECTIONS, "colour": tuple(COLOURS), "count": COUNTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A shape. `row` and `column` are its cell, for the moving one where it starts."""

    colour: str
    shape: str
    row: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A clip before it is drawn: figure 0 moves along its lane from end to end, the others stand still."""

    kind: str
    question: str
    answer: str
    direction: str
    figures: tuple[Figure, ...]
    background: tuple[int, int, int]


def question_text(kind: str, *, colour: str = "", shape: str = "") -> str:
    """The question of a kind (`direction` needs colour and shape, `colour` the shape, `count` neither)."""
    if kind == "direction":
        return f"Which way does the {colour} {shape} move? Answer with left, right, up or down."
    if kind == "colour":
        return f"What colour is the {shape} that moves? Answer with red, green, blue or yellow."
    return "How many shapes are in the video? Answer with 1, 2, 3 or 4."


def all_questions(num_kinds: int) -> list[str]:
    """Every question the first `num_kinds` kinds can ask."""
    questions = [question_text("direction", colour=c, shape=s) for c in COLOURS for s in SHAPES]
    if num_kinds > 1:
        questions += [question_text("colour", shape=s) for s in SHAPES]
    if num_kinds > 2:
        questions.append(question_text("count"))
    return questions


def make_scene(kind: str, answer: str, generator: np.random.Generator) -> Scene:
    """Draw a scene whose true answer is `answer`; everything else is random."""
    direction = answer if kind == "direction" else str(generator.choice(DIRECTIONS))
    colours = [str(colour) for colour in generator.permutation(list(COLOURS))]
    if kind == "colour":
        colours.remove(answer)
        colours.insert(0, answer)
    low, high = {"direction": (1, 2), "colour": (2, 3)}.get(kind, (0, 0))
    number = int(answer) if kind == "count" else int(generator.integers(low, high + 1))
    shapes = [str(generator.choice(SHAPES)) for _ in range(number)]
    if kind == "colour":
        # One shape for all: only the motion tells which one is meant.
        shapes = shapes[:1] * number
    cells = _cells(direction, number, generator)
    figures = tuple(
        Figure(colour=colours[i], shape=shapes[i], row=row, column=column) for i, (row, column) in enumerate(cells)
    )
    return Scene(
        kind=kind,
        question=question_text(kind, colour=colours[0], shape=shapes[0]),
        answer=answer,
        direction=direction,
        figures=figures,
        background=tuple(int(value) for value in generator.integers(0, 40, size=3)),  # type: ignore[arg-type]
    )


def render(scene: Scene) -> NDArray[np.uint8]:
    """Frames of a scene: [NUM_FRAMES, SIZE, SIZE, 3] uint8 RGB."""
    still = np.empty((SIZE, SIZE, 3), dtype=np.float32)
    still[:] = scene.background
    for figure in scene.figures[1:]:
        _draw(still, figure, _centre(figure.row), _centre(figure.column))
    frames = np.repeat(still[None], NUM_FRAMES, axis=0)
    mover = scene.figures[0]
    for frame, step in zip(frames, range(NUM_FRAMES), strict=True):
        row, column = _moved(scene.direction, mover, step / (NUM_FRAMES - 1))
        _draw(frame, mover, row, column)
    return np.rint(frames).astype(np.uint8)


def _cells(direction: str, number: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """The start of the lane, then cells off the lane, all distinct."""
    lane = int(generator.integers(NUM_CELLS))
    first = 0 if direction in ("right", "down") else NUM_CELLS - 1
    horizontal = direction in ("left", "right")
    start = (lane, first) if horizontal else (first, lane)
    free = [(r, c) for r in range(NUM_CELLS) for c in range(NUM_CELLS) if (r if horizontal else c) != lane]
    others = generator.choice(len(free), size=number - 1, replace=False)
    return [start, *(free[int(i)] for i in others)]


def _centre(cell: int) -> float:
    return CELL * (cell + 0.5) - 0.5


def _moved(direction: str, mover: Figure, fraction: float) -> tuple[float, float]:
    """Centre of the mover (row, column in pixels) after `fraction` of the clip."""
    distance = fraction * CELL * (NUM_CELLS - 1) * (1 if direction in ("right", "down") else -1)
    row, column = _centre(mover.row), _centre(mover.column)
    return (row, column + distance) if direction in ("left", "right") else (row + distance, column)


def _draw(frame: NDArray[np.float32], figure: Figure, row: float, column: float) -> None:
    """Blend a figure into `frame`; the share of a border pixel is its distance to the edge."""
    top, left = max(0, int(row - RADIUS) - 1), max(0, int(column - RADIUS) - 1)
    side = int(2 * RADIUS) + 5
    window = frame[top : top + side, left : left + side]
    rows = np.arange(top, top + window.shape[0], dtype=np.float32)[:, None] - row
    columns = np.arange(left, left + window.shape[1], dtype=np.float32)[None, :] - column
    distance = np.maximum(abs(rows), abs(columns)) if figure.shape == "square" else np.hypot(rows, columns)
    share = np.clip(RADIUS + 0.5 - distance, 0.0, 1.0)[..., None]
    window += share * (np.asarray(COLOURS[figure.colour], dtype=np.float32) - window)
