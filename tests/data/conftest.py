"""A prepared copy of the bundled task with few clips, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.core.resources import model_config_folder
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.tasks import Task, load_task
from rollplex_cli.profile.schema import DataProfile


@pytest.fixture(scope="session")
def shapes() -> Task:
    return load_task("shapes")


@pytest.fixture(scope="session")
def shapes_options() -> dict[str, int]:
    return {"num_train_clips": 9, "num_validation_clips": 8, "num_eval_clips": 4, "num_kinds": 3}


@pytest.fixture(scope="session")
def data_dir(shapes: Task, shapes_options: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    shapes.prepare(folder, shapes_options, 3)
    return folder


@pytest.fixture(scope="session")
def base_dir(shapes: Task, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = model_config_folder("tiny")
    assert config is not None
    folder = tmp_path_factory.mktemp("checkpoint") / "base"
    shapes.build_base(folder, data_dir, config / "config.json", 5)
    return folder


@pytest.fixture(scope="session")
def data_profile() -> DataProfile:
    return DataProfile(fps=2.0, max_frames=8, min_pixels=784, max_pixels=12544, max_prompt_tokens=512)


@pytest.fixture(scope="session")
def builder(base_dir: Path, data_profile: DataProfile) -> PromptBuilder:
    return PromptBuilder(base_dir, data_profile)
